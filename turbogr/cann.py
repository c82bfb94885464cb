"""CANN, Huawei's toolkit for NPUs: where it is installed and which release. Nothing is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
"""What CANN's set_env.sh sets; the first one that is set counts."""

RELEASE_FILE = "*-linux/ascend_toolkit_install.info"
"""Below CANN's folder; it has a line `version=...`."""

OLDEST = 9
"""Major release whose CMake package compiles the kernels (`find_package(ASC)`)."""


@dataclass(frozen=True)
class Cann:
    """An installation of CANN, or what stands in its place.

    Attributes:
        variable: which of VARIABLES names it.
        home: the folder named.
        release: such as 9.0.0; None where no release file tells.
    """

    variable: str
    home: Path
    release: str | None

    def problem(self) -> str | None:
        """Why kernels cannot be built with it, in words; None if nothing speaks against it."""
        if not self.home.is_dir():
            return f"{self.variable} names {self.home}, which is no folder"
        major = (self.release or "").partition(".")[0]
        if major.isdecimal() and int(major) < OLDEST:
            return f"CANN {self.release} in {self.home} is older than {OLDEST}, which the kernels need"
        return None


def find() -> Cann | None:
    """The installation that the environment names, whether it is sound or not; None where it names none."""
    for variable in VARIABLES:
        named = os.environ.get(variable)
        if named:
            return Cann(variable, Path(named), _release(Path(named)))
    return None


def _release(home: Path) -> str | None:
    for file in sorted(home.glob(RELEASE_FILE)):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition("=")
            if name.strip().lower() == "version" and value.strip():
                return value.strip()
    return None
