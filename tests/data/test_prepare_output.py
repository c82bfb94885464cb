"""`prepare`: a folder that appears whole or not at all, whatever ends the work; progress."""

import errno
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import duckdb
import pytest
from rich.console import Console

from tests.data.logs import some_triples, write_triples
from turbogr.data.filtering import EventStore
from turbogr.data.prepare import prepare
from turbogr.data.prepared import PreparedData
from turbogr.data.workspace import Database
from turbogr.errors import DataError


def test_output_folder(tmp_path):
    file = write_triples(tmp_path / "u.data", some_triples())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="full: the output folder is not empty"):
        prepare("movielens", [file], tmp_path / "full")
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"
    with pytest.raises(DataError, match=r"u\.data: the output folder is a file"):
        prepare("movielens", [file], file)
    with pytest.raises(DataError, match="cannot be made"):
        prepare("movielens", [file], file / "inside")
    (tmp_path / "empty").mkdir()
    prepare("movielens", [file], tmp_path / "empty")
    PreparedData.open(tmp_path / "empty")
    prepare("movielens", [file], tmp_path / "new" / "deep")
    PreparedData.open(tmp_path / "new" / "deep")
    assert oct((tmp_path / "empty").stat().st_mode) == oct((tmp_path / "full").stat().st_mode)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["deep"]


def test_output_folder_filled_meanwhile(tmp_path, monkeypatch):
    real = EventStore.counts

    def somebody_else(store):
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "theirs.txt").write_text("theirs")
        return real(store)

    monkeypatch.setattr(EventStore, "counts", somebody_else)
    with pytest.raises(DataError, match=r"cannot be written or read \(Directory not empty\)"):
        prepare("movielens", [write_triples(tmp_path / "u.data", some_triples())], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "u.data"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["theirs.txt"]


def _full(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def _duckdb_full(*_args, **_kwargs):
    raise duckdb.IOException("IO Error: Could not write all bytes to file: No space left on device")


@pytest.mark.parametrize(
    ("place", "failure"),
    [
        ("turbogr.data.filtering.EventStore._write", _full),
        ("turbogr.data.filtering.EventStore.fill", _duckdb_full),
        ("turbogr.data.prepare.write_manifest", _full),
        ("numpy.save", _full),
    ],
    ids=["while ordering", "in DuckDB", "manifest", "arrays"],
)
def test_disk_full_leaves_nothing(tmp_path, monkeypatch, place, failure):
    file = write_triples(tmp_path / "u.data", some_triples())
    monkeypatch.setattr(place, failure)
    with pytest.raises(DataError, match="out: the disk is full"):
        prepare("movielens", [file], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["u.data"]


def test_really_full_disk(tmp_path):
    """A file system of 1 MB, where the machine allows to mount one."""
    file = write_triples(tmp_path / "u.data", some_triples(events=200_000, users=500))
    mount = tmp_path / "small"
    mount.mkdir()
    script = (
        f"mount -t tmpfs -o size=1m tmpfs {mount} && "
        f"{sys.executable} -m turbogr data prepare movielens {file} --out {mount}/out; "
        f"echo rc $?; ls -A {mount} | wc -l"
    )
    probe = subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", str(mount)], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip("this machine does not allow to mount a small file system")
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, check=False)
    assert "the disk is full" in done.stderr, done.stderr
    assert done.stdout.split() == ["rc", "1", "0"]


def test_no_room_to_spill_is_a_full_disk(tmp_path, monkeypatch):
    """DuckDB calls it out of memory, though more memory is not what was missing."""

    def fail(database, *_args):
        def work():
            raise duckdb.OutOfMemoryException("failed to offload data block ('max_temp_directory_size' was reached)")

        return database._run(work)

    monkeypatch.setattr("turbogr.data.workspace.Database.batches", fail)
    with pytest.raises(DataError, match="out: the disk is full"):
        prepare("movielens", [write_triples(tmp_path / "u.data", some_triples())], tmp_path / "out")


LONG_WORK = {
    "in Python": "import time; time.sleep(600)",
    "in DuckDB": "self._database.execute('SELECT count(*) FROM range(1000000000000) t(i) WHERE i % 7 = 3')",
    "in a result of DuckDB": "list(self._database.batches('SELECT i FROM range(1000000000000) t(i) WHERE i < 0', 1000))",
    "in a condition": "raise RuntimeError('Query interrupted')",  # what DuckDB raises in the main thread
}


@pytest.mark.parametrize("work", LONG_WORK)
def test_ctrl_c_leaves_nothing(tmp_path, work):
    """A real Ctrl-C in a real process, in a step that would last for minutes."""
    file = write_triples(tmp_path / "u.data", some_triples())
    script = (
        "import sys\n"
        "from turbogr.data import prepare\n"
        "from turbogr.data.commands import main\n"
        "def order(self):\n"
        "    print('working', flush=True)\n"
        f"    {LONG_WORK[work]}\n"
        "prepare._Preparation._order = order\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", script, "prepare", "movielens", str(file), "--out", str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "working\n"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "interrupted; nothing was left behind" in stderr
    assert "Traceback" not in stderr
    assert [path.name for path in tmp_path.iterdir()] == ["u.data"]


def test_interrupt_in_a_late_step_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr("turbogr.data.prepare.write_manifest", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare("movielens", [write_triples(tmp_path / "u.data", some_triples())], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["u.data"]


def test_progress_goes_where_it_is_asked(tmp_path, capsys):
    file = write_triples(tmp_path / "u.data", some_triples())
    prepare("movielens", [file], tmp_path / "quiet")
    assert capsys.readouterr() == ("", "")
    with (tmp_path / "log.txt").open("w") as stream:
        prepare("movielens", [file], tmp_path / "loud", console=Console(file=stream))
    shown = (tmp_path / "log.txt").read_text()
    for phase in ("Reading", "Counting", "Ordering", "Filtering", "Writing"):
        assert phase in shown


def test_interrupt_when_a_query_is_taken_and_not_begun(tmp_path, monkeypatch):
    """The database must not be closed under a thread that is about to use it: that was seen to hang for the whole query."""
    real, ended = ThreadPoolExecutor.submit, []

    def submit(pool, work):
        def late():
            time.sleep(0.3)
            try:
                work()
            except BaseException as error:
                ended.append(type(error))
                raise

        real(pool, late)
        time.sleep(0.1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Database(tmp_path, "1GB") as database:  # noqa: PT012
        monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
        database.execute("SELECT count(*) FROM range(1000000000000) t(i) WHERE i % 7 = 3")
    assert ended == [duckdb.InterruptException]
