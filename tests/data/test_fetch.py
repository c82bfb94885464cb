"""MovieLens-100K out of a wheel: a stand-in for pip plays its failures; one test asks the real one."""

import hashlib
import stat
import sys
import zipfile
from pathlib import Path

import pytest

from turbogr.data import fetch
from turbogr.data.fetch import fetch_movielens_100k
from turbogr.errors import DataError

CONTENT = b"user_id:token\titem_id:token\trating:float\ttimestamp:float\n196\t242\t3\t881250949\n"


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """Replace the interpreter by a script: ``pip("shell lines")``; $dest is the --dest folder; calls are logged."""
    calls = tmp_path / "calls.txt"

    def install(script: str) -> Path:
        path = tmp_path / "python"
        path.write_text(
            f'#!/bin/sh\necho "$@" >> "{calls}"\nwhile [ "$1" != --dest ]; do shift; done\ndest="$2"\n{script}\n',
            encoding="utf-8",
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(path))
        return calls

    return install


@pytest.fixture
def wheel(tmp_path) -> Path:
    path = tmp_path / "recbole-1.2.1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("recbole/dataset_example/ml-100k/ml-100k.inter", CONTENT)
    return path


@pytest.fixture
def _expect_content(monkeypatch):
    monkeypatch.setattr(fetch, "FILE_BYTES", len(CONTENT))
    monkeypatch.setattr(fetch, "FILE_SHA256", hashlib.sha256(CONTENT).hexdigest())


@pytest.mark.usefixtures("_expect_content")
def test_file_is_fetched_once(tmp_path, pip, wheel, capsys):
    calls = pip(f'cp "{wheel}" "$dest"')
    out = tmp_path / "deep" / "out"
    path = fetch_movielens_100k(out)
    assert path == out / "ml-100k.inter"
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in out.iterdir()] == ["ml-100k.inter"], "no temporary folder is left"
    assert str(path) in capsys.readouterr().err
    call = calls.read_text().split()
    assert call[:3] == ["-m", "pip", "download"]
    assert {"--no-deps", "recbole==1.2.1"} <= set(call)

    calls.unlink()
    assert fetch_movielens_100k(out) == path
    assert not calls.exists(), "nothing is downloaded the second time"
    assert "already" in capsys.readouterr().err


def test_another_file_at_its_place_is_kept(tmp_path, pip):
    calls = pip("exit 1")
    (tmp_path / "ml-100k.inter").write_bytes(CONTENT)
    with pytest.raises(DataError, match=r"not the expected file: 77 bytes.*expected 1,979,230 bytes"):
        fetch_movielens_100k(tmp_path)
    assert (tmp_path / "ml-100k.inter").read_bytes() == CONTENT
    assert not calls.exists()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('echo "WARNING: retrying" >&2; echo "ERROR: No matching distribution found" >&2; exit 1', "ERROR: No matching dist"),
        ('echo "python: No module named pip" >&2; exit 1', "No module named pip"),
        ("exit 3", "exit status 3"),
        ("exit 0", "exit status 0, 0 wheels"),
    ],
    ids=["no network", "no pip", "silent failure", "nothing downloaded"],
)
def test_failing_pip_tells_how_to_go_on_by_hand(tmp_path, pip, script, message):
    pip(script)
    out = tmp_path / "out"
    with pytest.raises(DataError, match=message) as caught:
        fetch_movielens_100k(out)
    assert f"copy its {fetch.MEMBER} to {out / 'ml-100k.inter'}" in str(caught.value)
    assert list(out.iterdir()) == []


def test_wheel_with_another_content_is_refused(tmp_path, pip, wheel):
    pip(f'cp "{wheel}" "$dest"')
    with pytest.raises(DataError, match="not the expected file"):
        fetch_movielens_100k(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("damage", ["not a zip", "no member"])
def test_damaged_wheel_is_refused(tmp_path, pip, wheel, damage):
    if damage == "not a zip":
        wheel.write_bytes(b"<html>proxy login</html>")
    else:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("recbole/__init__.py", "")
    pip(f'cp "{wheel}" "$dest"')
    with pytest.raises(DataError, match=r"recbole-1\.2\.1.*damaged or holds no"):
        fetch_movielens_100k(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_folder_below_a_file_is_refused(tmp_path, pip):
    pip("exit 1")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be used"):
        fetch_movielens_100k(tmp_path / "file" / "out")


def test_the_real_wheel(tmp_path):
    try:
        path = fetch_movielens_100k(tmp_path)
    except DataError as error:
        if "pip could not download" not in str(error):
            raise
        pytest.skip("no package registry can be reached from here")
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0].split("\t") == ["user_id:token", "item_id:token", "rating:float", "timestamp:float"]
    assert len(lines) == 100_001
