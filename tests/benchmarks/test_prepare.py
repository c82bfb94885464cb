"""The benchmark of `turbogr data prepare`, on a short log."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.slow
def test_benchmark_runs_and_finds_both_results_equal(tmp_path):
    out = tmp_path / "prepare.json"
    command = [sys.executable, str(FOLDER / "prepare.py"), "--quick", "--rows", "500000", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    stored = json.loads(out.read_text(encoding="utf-8"))["rows"]
    rows = {(row["claim"].split()[0], row["claim"].split(": ")[1]): row for row in stored}
    assert rows["prepare", "numbers unlike the baseline's"]["value"] == 0
    for claim in ("speed", "peak memory"):
        assert min(rows["prepare", claim]["value"], rows["prepare", claim]["baseline"]) > 0
        assert rows["synthesize", claim]["value"] > 0


def write(folder: Path, items: list[int], ids: list[int]) -> Path:
    folder.mkdir()
    for name, values in (("items", items), ("times", [1, 2, 3]), ("offsets", [0, 3])):
        np.save(folder / f"{name}.npy", np.array(values))
    for name, values in (("users", [7]), ("catalogue", ids)):
        pq.write_table(pa.table({"id": values}), folder / f"{name}.parquet")
    return folder


def test_unequal_results_are_noticed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    benchmark = importlib.import_module("prepare")
    reference = write(tmp_path / "a", [0, 1, 2], [4, 5, 6])
    assert benchmark.differences(reference, write(tmp_path / "b", [0, 1, 2], [4, 5, 6])) == 0
    assert benchmark.differences(reference, write(tmp_path / "c", [0, 2, 1], [4, 5, 6])) == 2, "another order"
    assert benchmark.differences(reference, write(tmp_path / "d", [0, 1, 2], [4, 5, 9])) == 1, "another id"
    assert benchmark.differences(reference, write(tmp_path / "e", [0, 1, 2], [4, 5])) == 3, "another number of items"
