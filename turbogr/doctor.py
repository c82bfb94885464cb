"""`turbogr doctor`: what is installed, what is expected, which back end each operator uses and why, and how to mend it.

Nothing that may be broken is imported in this process: a child process does it (`turbogr.probe`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import runpy
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.table import Table
from rich.text import Text

from turbogr import cann
from turbogr.errors import MissingDependencyError
from turbogr.ops import npu_plugin, toolchain
from turbogr.probe import ACCELERATORS, NPU_PLUGIN, OPERATORS

TORCHREC = "1.8.0"
"""Release of torchrec built for the torch that our metadata asks for."""
FBGEMM = "1.8.0"
"""Release of fbgemm-gpu built for the torch that our metadata asks for: 1.7 and 1.9 do not load beside torch 2.13."""

IMPORT_SECONDS = 180
"""A package that takes longer than this to import is called broken."""

_FBGEMM_BUILDS = ("fbgemm-gpu-cpu", "fbgemm-gpu")
_MODULES = {"pyyaml": "yaml", "lightning": "lightning.pytorch", "torch-npu": "torch_npu"}
_AUTOLOAD = "backend extension: torch_npu"
"""What torch's import says where torch_npu is installed and cannot be loaded: torch loads it without being asked."""
_STYLE = {"ok": "green", "optional": "dim", "warning": "yellow", "broken": "bold red"}


@dataclass
class Finding:
    """One row of the report.

    Attributes:
        name: distribution name.
        found: version installed, or "-".
        expected: version specifier.
        status: "broken" makes the exit code 1.
        message: what is wrong, one line.
        mend: the command that mends it.
    """

    name: str
    found: str
    expected: str
    status: Literal["ok", "optional", "warning", "broken"] = "ok"
    message: str = ""
    mend: str = ""


@dataclass
class Probe:
    """What the child processes answered.

    Attributes:
        errors: message of every name that could not be imported or answered.
        answers: what ACCELERATORS, OPERATORS and NPU_PLUGIN gave.
    """

    errors: dict[str, str] = field(default_factory=dict)
    answers: dict[str, Any] = field(default_factory=dict)


def main(args: list[str] | None = None) -> int:
    """Runs `turbogr doctor`.

    Args:
        args: command line without the program's name and "doctor".

    Returns:
        Exit code: 1 if something that training on one device needs is broken, else 0.
    """
    parser = argparse.ArgumentParser(
        prog="turbogr doctor",
        allow_abbrev=False,  # a misspelt option must not be taken for one that starts like it
        description="Shows what is installed, what is expected, the back end of each operator, and how to mend problems.",
    )
    parser.add_argument(
        "--companions",
        action="store_true",
        help="only print the torchrec and fbgemm releases that fit the installed torch, for pip install --no-deps",
    )
    parser.add_argument(
        "--import",
        dest="modules",
        metavar="MODULE",
        action="append",
        default=[],
        help="also import this module, which registers operators of your own; may be given several times",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="only compile the C++ kernels that are not compiled yet, all at once, and show the back end of each operator",
    )
    options = parser.parse_args(args)
    if options.companions:
        print(" ".join(companions()))
        return 0

    console = Console()
    if options.compile:
        with console.status("compiling ..."):
            result = probe([*options.modules, OPERATORS])
        _print_operators(console, result)
        for name, error in result.errors.items():
            console.print(f"broken: {name}: {error}", style=_STYLE["broken"], highlight=False, soft_wrap=True, markup=False)
        return int(bool(result.errors))
    try:
        required, optional = _requirements()
    except PackageNotFoundError:
        console.print("turbogr is on the path but not installed, so what it needs is unknown. Mend: pip install -e .")
        return 1
    wanted = [*required, *(Requirement(text) for text in companions()), *optional]
    installed = [r for r in wanted if _version(r.name) is not None]
    with console.status("importing every package ..."):
        plugin = [NPU_PLUGIN] if _plugin_can_be_loaded() else []
        result = probe([*(_module(r.name) for r in installed), ACCELERATORS, *plugin, *options.modules, OPERATORS])
    findings = [_python()]
    findings += [_judge(r, result, "broken") for r in required]
    findings += [_judge_companion(Requirement(text), result) for text in companions()]
    findings += [_judge(r, result, "optional" if _version(r.name) is None else "warning") for r in optional]
    findings += [_judge_module(name, result) for name in options.modules]
    if OPERATORS in result.errors:
        findings.append(Finding("turbogr.ops", "-", "", "broken", result.errors[OPERATORS], "mend the packages above first"))
    _print(console, findings, result)
    return int(any(f.status == "broken" for f in findings))


def companions() -> list[str]:
    """Requirements of torchrec and of the fbgemm build that fits the installed torch (CUDA or not)."""
    build = "fbgemm-gpu" if _torch_cuda() else "fbgemm-gpu-cpu"
    return [f"torchrec=={TORCHREC}", f"{build}=={FBGEMM}"]


def probe(names: list[str]) -> Probe:
    """Imports modules in child processes: one for all, and another for the rest after each that ended its process.

    Args:
        names: modules, ACCELERATORS, OPERATORS or NPU_PLUGIN, in the order in which they are imported.
    """
    result, left = Probe(), list(names)
    # The child must see what this process sees, and nothing of the folder it is started in.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    while left:
        seconds = IMPORT_SECONDS + (toolchain.COMPILE_SECONDS if OPERATORS in left else 0)
        command = [sys.executable, "-P", "-W", "ignore", "-m", "turbogr.probe", *left]
        try:
            child = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment, check=False)
            output, error = child.stdout, _last_error(child.stderr, child.returncode)
        except subprocess.TimeoutExpired as expired:
            output = expired.stdout.decode() if isinstance(expired.stdout, bytes) else expired.stdout or ""
            error = f"no answer within {seconds} s"
        culprit = left[0]
        for line in _json_lines(output):
            if "start" in line:
                culprit = line["start"]
            elif "done" in line:
                result.answers[line["done"]] = line["answer"]
        left = left[left.index(culprit) :]
        if culprit not in result.answers:
            result.errors[culprit] = error
        left = left[1:]
    return result


def _requirements() -> tuple[list[Requirement], list[Requirement]]:
    """What turbogr's own metadata asks for: needed packages, and the optional ones of the hardware and logging extras."""
    required, optional = [], []
    for text in requires("turbogr") or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            required.append(requirement)
        elif any(requirement.marker.evaluate({"extra": extra}) for extra in ("cuda", "npu", "tensorboard")):
            optional.append(requirement)
    return required, optional


def _python() -> Finding:
    return Finding("python", platform.python_version(), ">=3.11", message=sys.executable)


def _judge(requirement: Requirement, result: Probe, severity: Literal["broken", "warning", "optional"]) -> Finding:
    """Compares one package with what is expected; `severity` is the status if they differ."""
    found = _version(requirement.name)
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    wanted = f"{requirement.name}{extras}{requirement.specifier}"
    finding = Finding(requirement.name, found or "-", str(requirement.specifier) or "any")
    finding.mend = _pip(wanted)
    if found is None:
        finding.status, finding.message = severity, "not installed"
    elif not _satisfies(found, requirement.specifier):
        finding.status, finding.message = severity, f"{found} does not satisfy {requirement.specifier}"
    elif _module(requirement.name) in result.errors:
        finding.status, finding.message = severity, f"import fails: {result.errors[_module(requirement.name)]}"
        finding.mend = _pip("--force-reinstall", "--no-deps", wanted)
        if requirement.name == "torch" and _AUTOLOAD in finding.message:
            finding.mend = f"{_pip_run('uninstall', '-y', 'torch-npu')}  (or, with CANN, source its set_env.sh)"
    else:
        finding.mend = ""
        if requirement.name == "torch":
            cuda = _torch_cuda()
            finding.message = f"build: CUDA {cuda}" if cuda else "build: CPU"
    return finding


def _judge_companion(requirement: Requirement, result: Probe) -> Finding:
    """One of torchrec and fbgemm: training on one device does without them, so that the worst status is a warning."""
    finding = _judge(requirement, result, "warning")
    if finding.status == "ok":
        return finding
    missing = re.search(r"No module named '(\w+)", finding.message)
    helpers = {_module(r.name): r for r in map(Requirement, requires("turbogr") or []) if _in_extra(r, "torchrec")}
    builds = [name for name in _FBGEMM_BUILDS if _version(name) is not None]
    if missing and missing[1] not in ("torchrec", "fbgemm_gpu"):
        lacking = [f"{r.name}{r.specifier}" for module, r in helpers.items() if find_spec(module) is None]
        finding.mend = _pip(*(lacking or [missing[1].replace("_", "-")]))
    elif requirement.name in _FBGEMM_BUILDS and builds and builds != [requirement.name]:
        # Both builds write into one folder: with two of them, or the wrong one, only a clean start helps.
        finding.message += f" ({' and '.join(builds)} installed; this torch needs {requirement.name})"
        finding.mend = f"{_pip_run('uninstall', '-y', *builds)} && {_pip('--no-deps', str(requirement))}"
    else:
        finding.mend = _pip("--no-deps", *(["--force-reinstall"] if finding.found != "-" else []), str(requirement))
    finding.message += "; distributed tables need it, training on one device does not"
    return finding


def _judge_module(name: str, result: Probe) -> Finding:
    """A module of the user's, named on the command line."""
    finding = Finding(name, "-", "--import")
    if name in result.errors:
        finding.status, finding.message = "broken", f"import fails: {result.errors[name]}"
        finding.mend = f"mend {name}, or put its folder on the path: PYTHONPATH=FOLDER turbogr doctor --import {name}"
    return finding


def _print(console: Console, findings: list[Finding], result: Probe) -> None:
    table = Table("package", "found", "expected", "status", title="turbogr doctor", title_justify="left")
    table.add_column("remark", overflow="fold")
    for f in findings:
        table.add_row(f.name, f.found, f.expected, Text(f.status, style=_STYLE[f.status]), f.message)
    console.print(table)

    _print_operators(console, result)
    found = result.answers.get(ACCELERATORS)
    devices = ", ".join(found) if found else result.errors.get(ACCELERATORS) or "none, the CPU is used"
    console.print(f"accelerators: {devices}", highlight=False, soft_wrap=True, markup=False)
    for line in (f"NPU: {_npu(result)}", f"CANN: {_cann()}", f"NPU plugin: {_npu_plugin(result)}"):
        console.print(line, highlight=False, soft_wrap=True, markup=False)

    mends = [f for f in findings if f.status in ("broken", "warning")]
    for f in mends:
        # Without soft wrapping the console would break the command in two.
        console.print(f"to mend {f.name}: {f.mend}", highlight=False, soft_wrap=True, markup=False)
    broken = [f.name for f in findings if f.status == "broken"]
    verdict = f"broken: {', '.join(broken)}" if broken else "training on one device: ready"
    console.print(verdict, style=_STYLE["broken" if broken else "ok"], highlight=False, soft_wrap=True)


def _print_operators(console: Console, result: Probe) -> None:
    table = Table("operator", "back end", "why", title="operators", title_justify="left")
    for info in result.answers.get(OPERATORS) or []:
        table.add_row(info["name"], info["backend"], info["reason"])
    if table.row_count:
        console.print(table)
    console.print(f"C++ compiler: {_compiler()}", highlight=False, soft_wrap=True, markup=False)


def _compiler() -> str:
    try:
        command, told = toolchain.compiler()
        return f"{shlex.join(command)} ({told.splitlines()[0]}); compiled kernels: {toolchain.cache_dir()}"
    except MissingDependencyError as error:
        return f"none, operators use PyTorch, which is slower: {error}"


def _npu(result: Probe) -> str:
    """What `trainer.accelerator npu` would find."""
    found = _version("torch-npu")
    if found is None:
        return "torch_npu is not installed; accelerator npu needs it, other accelerators do not"
    problem = result.errors.get("torch_npu") or next((e for e in result.errors.values() if _AUTOLOAD in e), None)
    if problem is not None:
        return f"torch_npu {found} cannot be loaded ({problem}): source set_env.sh of CANN, or uninstall it"
    count = sum(device.startswith("npu:") for device in result.answers.get(ACCELERATORS) or [])
    return f"torch_npu {found}, {count} visible" + ("; set trainer.accelerator npu" if count else ": no NPU can be used here")


def _cann() -> str:
    """Huawei's toolkit, as the environment names it."""
    found = cann.find()
    if found is None:
        return f"not found ({' and '.join(cann.VARIABLES)} are not set: source its set_env.sh); only NPUs need it"
    return found.problem() or f"{found.release or 'of unknown release'}, {found.variable} is {found.home}"


def _npu_plugin(result: Probe) -> str:
    """Kernels for NPUs: built, loadable, and if not, why."""
    try:
        libraries = npu_plugin.libraries()
    except MissingDependencyError as error:
        return f"cannot be looked for: {error}"
    if NPU_PLUGIN in result.errors:
        return f"built, but cannot be loaded ({result.errors[NPU_PLUGIN]}); operators run in PyTorch on NPUs"
    if NPU_PLUGIN in result.answers:
        return f"built and loaded: {libraries.plugin}"
    missing = libraries.missing()
    if missing is not None:
        return f"{missing}; without it operators run in PyTorch on NPUs"
    return f"built: {libraries.plugin}; it cannot be loaded without torch_npu"


def _plugin_can_be_loaded() -> bool:
    """Whether there is something to load, and what it needs."""
    try:
        return _version("torch-npu") is not None and npu_plugin.libraries().missing() is None
    except MissingDependencyError:
        return False


def _torch_cuda() -> str | None:
    """CUDA release that the installed torch was built with, read without importing torch; None for a CPU build."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "version.py"
    return runpy.run_path(str(path)).get("cuda") if path.is_file() else None


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _satisfies(found: str, specifier: SpecifierSet) -> bool:
    return specifier.contains(found, prereleases=True)


def _in_extra(requirement: Requirement, extra: str) -> bool:
    marker = requirement.marker
    return marker is not None and not marker.evaluate({"extra": ""}) and marker.evaluate({"extra": extra})


def _module(distribution: str) -> str:
    if distribution in _FBGEMM_BUILDS:
        return "fbgemm_gpu"
    return _MODULES.get(distribution, distribution.replace("-", "_"))


def _pip(*arguments: str) -> str:
    return _pip_run("install", *arguments)


def _pip_run(*arguments: str) -> str:
    return shlex.join([sys.executable, "-m", "pip", *arguments])


def _json_lines(output: str) -> Iterator[dict[str, Any]]:
    # Packages may print at import; our own lines are the JSON objects.
    for line in output.splitlines():
        if line.startswith(('{"start":', '{"done":')):
            yield json.loads(line)


def _last_error(stderr: str, code: int) -> str:
    """The line that says what ended a child."""
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name} during the import"
    lines = [line for line in stderr.splitlines() if line.strip()]
    # A traceback ends with "SomeError: message"; a message of several lines is told by its first one.
    errors = [line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Warning)\b", line)]
    return (errors or lines or [f"exit code {code}"])[-1].strip()
