"""Speed and memory of ``turbogr data prepare kuairand`` on a look-alike of KuaiRand-27K with 20 million rows.

The look-alike (about 1.5 GB of CSV) is written into a temporary folder and prepared there in a child process, once by turbogr
and once by the baseline: the same protocol with everything in memory, PyArrow's CSV reader and NumPy (below, `baseline`). The
two results must be equal, event by event.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from _report import Report, parse_arguments

# NumPy and PyArrow are imported where they are used: Linux counts a parent's memory into the peak of the children it starts.

ROWS, QUICK_ROWS = 20_000_000, 2_000_000
USERS = 27_285  # as many as the original, with shortened histories: repeated user-item pairs stay as rare as there
MEMORY_TARGET_GIB = 4.0
SIGNALS = ("is_click", "is_like", "is_follow", "is_comment", "is_forward", "long_view")
K_CORE, LEAST_EVENTS = 5, 3


@dataclass(frozen=True)
class Run:
    """A child process that ended well: wall time in s and peak of its resident memory in GiB."""

    seconds: float
    peak_gib: float


def measure(command: list[str]) -> Run:
    """Run a command and measure it; its progress and errors go to this terminal, its tables nowhere."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        _, status, usage = os.wait4(process.pid, 0)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    seconds = time.perf_counter() - started
    code = process.returncode = os.waitstatus_to_exitcode(status)
    if code != 0:
        raise SystemExit(f"exit status {code} of: {' '.join(command)}")
    unit = 1 if sys.platform == "darwin" else 1024
    return Run(seconds, usage.ru_maxrss * unit / 2**30)


def baseline(logs: Path, out: Path) -> None:
    """The protocol in memory: positive and not hated events, 5-core to the fixed point, ordered by (user, time, file order)."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.csv as pacsv
    import pyarrow.parquet as pq

    wanted = pacsv.ConvertOptions(include_columns=["user_id", "video_id", "time_ms", "is_hate", *SIGNALS])
    table = pa.concat_tables([pacsv.read_csv(file, convert_options=wanted) for file in sorted(logs.glob("log_*.csv"))])
    keep = np.zeros(len(table), dtype=bool)
    for signal in SIGNALS:
        keep |= table[signal].to_numpy() == 1
    keep &= table["is_hate"].to_numpy() == 0
    user, item, when = (table[name].to_numpy()[keep] for name in ("user_id", "video_id", "time_ms"))
    del table
    user_ids, user = np.unique(user, return_inverse=True)
    item_ids, item = np.unique(item, return_inverse=True)
    while True:
        good = (np.bincount(user, minlength=len(user_ids)) >= K_CORE)[user]
        good &= (np.bincount(item, minlength=len(item_ids)) >= K_CORE)[item]
        if good.all():
            break
        user, item, when = user[good], item[good], when[good]
    good = (np.bincount(user, minlength=len(user_ids)) >= LEAST_EVENTS)[user]
    order = np.lexsort((when[good], user[good]))
    user, item, when = user[good][order], item[good][order], when[good][order]
    for name, ids, rows in (("users", user_ids, user), ("catalogue", item_ids, item)):
        counts = np.bincount(rows, minlength=len(ids))
        held = np.flatnonzero(counts)
        columns = {"row": np.arange(len(held)), "id": ids[held], "events": counts[held]}
        pq.write_table(pa.table(columns), out / f"{name}.parquet", compression="zstd")
    user, item = (np.unique(rows, return_inverse=True)[1].astype(np.int32) for rows in (user, item))
    np.save(out / "items.npy", item)
    np.save(out / "times.npy", when)
    np.save(out / "offsets.npy", np.concatenate([[0], np.cumsum(np.bincount(user))]))
    pq.write_table(pa.table({"user": user, "item": item, "time": when}), out / "events.parquet", compression="zstd")


def differences(ours: Path, theirs: Path) -> int:
    """Numbers of the two results that are not equal, over events, times, users and original ids."""
    import numpy as np
    import pyarrow.parquet as pq

    count = 0
    for name in ("items.npy", "times.npy", "offsets.npy", "users.parquet", "catalogue.parquet"):
        arrays = []
        for folder in (ours, theirs):
            file = folder / name
            arrays.append(np.load(file, mmap_mode="r") if file.suffix == ".npy" else pq.read_table(file)["id"].to_numpy())
        same_length = len(arrays[0]) == len(arrays[1])
        count += int(np.count_nonzero(arrays[0] != arrays[1])) if same_length else max(map(len, arrays))
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, help=f"standard rows of the look-alike ({ROWS:,}; quick: {QUICK_ROWS:,})")
    parser.add_argument("--baseline", nargs=2, type=Path, metavar=("LOGS", "OUT"), help=argparse.SUPPRESS)  # the child
    arguments = parse_arguments(parser)
    if arguments.baseline:
        baseline(*arguments.baseline)
        return 0
    rows = arguments.rows or (QUICK_ROWS if arguments.quick else ROWS)
    turbogr = [sys.executable, "-m", "turbogr", "data"]
    with tempfile.TemporaryDirectory(prefix="turbogr-bench-") as temporary:
        logs, ours, theirs = (Path(temporary) / name for name in ("logs", "ours", "theirs"))
        size = ["--users", str(USERS), "--rows", str(rows), "--seed", "0"]
        written = measure([*turbogr, "synthesize", "kuairand", *size, "--out", str(logs)])
        megabytes = sum(file.stat().st_size for file in logs.iterdir()) / 1e6
        theirs.mkdir()
        alternative = measure([sys.executable, __file__, "--baseline", str(logs), str(theirs)])
        prepared = measure([*turbogr, "prepare", "kuairand", str(logs), "--out", str(ours)])
        unequal = differences(ours, theirs)
        manifest = json.loads((ours / "manifest.json").read_text(encoding="utf-8"))
    read = manifest["counts"][0]["events"]
    report = Report("prepare", quick=arguments.quick)
    label = f"prepare {read / 1e6:.1f}M rows"
    report.add(f"{label}: speed", read / prepared.seconds, "rows/s", baseline=read / alternative.seconds)
    report.add(f"{label}: peak memory", prepared.peak_gib, "GiB", baseline=alternative.peak_gib, at_most=MEMORY_TARGET_GIB)
    report.add(f"{label}: numbers unlike the baseline's", unequal, "numbers", at_most=0)
    report.add(f"synthesize {read / 1e6:.1f}M rows: speed", read / written.seconds, "rows/s")
    report.add(f"synthesize {read / 1e6:.1f}M rows: peak memory", written.peak_gib, "GiB", at_most=2.0)
    report.note(f"{megabytes:,.0f} MB of CSV; kept {manifest['num_events']:,} events of {manifest['num_users']:,} users")
    report.note("baseline: everything in memory with PyArrow and NumPy, without checks, checksums or a content hash")
    return report.finish(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
