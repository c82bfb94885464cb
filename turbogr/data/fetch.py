"""Real data from the package registry alone: MovieLens-100K lies inside a wheel on PyPI."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from rich.console import Console

from turbogr.errors import DataError

# RecBole ships MovieLens-100K (Harper & Konstan, TiiS 2015, https://doi.org/10.1145/2827872) as an example. Only this one file
# of the wheel is used, none of its code, so it is downloaded without its dependencies and never installed.
WHEEL = "recbole==1.2.1"
MEMBER = "recbole/dataset_example/ml-100k/ml-100k.inter"
FILE_NAME = "ml-100k.inter"
FILE_BYTES = 1_979_230
FILE_SHA256 = "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff"


def fetch_movielens_100k(out: Path) -> Path:
    """Put MovieLens-100K (943 users, 1,682 movies, 100,000 ratings) into a folder as ``ml-100k.inter``.

    The file is taken out of the wheel ``recbole==1.2.1``, which ``pip`` downloads into a temporary folder with the index and
    proxies it is configured for. A file that is already there is checked and kept, and nothing is downloaded.

    Args:
        out: Folder to put the file in; made if absent, other files in it are left alone.

    Returns:
        Path of the file: tab-separated, header ``user_id:token item_id:token rating:float timestamp:float``.

    Raises:
        DataError: The download fails, the wheel does not hold the expected file, another file stands at its place, or the
            folder cannot be written.
    """
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    target = out / FILE_NAME
    try:
        if target.exists():
            _check(
                target, f"{target}: is there already and is", f"delete it to fetch it again, or give another --out than {out}"
            )
            console.print(f"MovieLens-100K is at {target} already, nothing is downloaded")
            return target
        out.mkdir(parents=True, exist_ok=True)
        # Inside the target folder, so that the last step is a rename within one file system.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=out) as folder:
            with console.status(f"downloading {WHEEL} (2 MB) with pip"):
                wheel = _download(Path(folder), target)
            extracted = Path(folder) / FILE_NAME
            _extract(wheel, extracted)
            _check(extracted, f"{WHEEL}: its {FILE_NAME} is", _by_hand(target))
            os.replace(extracted, target)
    except OSError as error:
        raise DataError(
            f"{error.filename or target}: cannot be used ({error.strerror or error}); give another --out"
        ) from error
    console.print(f"MovieLens-100K (100,000 ratings) written to {target}")
    return target


def _by_hand(target: Path) -> str:
    return (
        f"to give the file by hand, run `pip download --no-deps {WHEEL}` where there is a network, unzip the wheel, and copy "
        f"its {MEMBER} to {target}"
    )


def _download(folder: Path, target: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--quiet"]
    done = subprocess.run([*command, "--dest", str(folder), WHEEL], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        said = (done.stderr or done.stdout).strip().splitlines()
        errors = [line for line in said if line.startswith("ERROR")] or said
        reason = errors[-1] if errors else f"exit status {done.returncode}, {len(wheels)} wheels"
        raise DataError(f"pip could not download {WHEEL}: {reason}\n{_by_hand(target)}")
    return wheels[0]


def _extract(wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DataError(
            f"{wheel.name}: is damaged or holds no {MEMBER}; empty pip's cache (`pip cache purge`), try again"
        ) from error


def _check(path: Path, what: str, remedy: str) -> None:
    if not path.is_file():
        raise DataError(f"{what} not a file; {remedy}")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    size = path.stat().st_size
    if (size, found) != (FILE_BYTES, FILE_SHA256):
        raise DataError(
            f"{what} not the expected file: {size:,} bytes with sha256 {found}, expected {FILE_BYTES:,} bytes with sha256 "
            f"{FILE_SHA256}; {remedy}"
        )
