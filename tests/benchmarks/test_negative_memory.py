"""What benchmarks/negative_memory.py makes of measurements, and one measurement of a small model."""

from __future__ import annotations

import pytest
import torch
from _fuxi_large import GATHERED, ITEMS, TABLE_7, extrapolated, extrapolated_table, rest_of_the_paper
from _negative_sides import PLAIN, SIDES
from _overlap import beside
from _report import Report
from _results import with_section
from negative_memory import PAGE, Cuda, Host, Measured, Shape, add_rows, measure, section

TINY = Shape("tiny", 1, 256, 20_000, (8,), promised=False)


@pytest.fixture(scope="module")
def measured():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    report = Report("negative_memory")
    try:
        yield report, measure(report, Host(), TINY, 1, [PLAIN, "fused", "fp16", "offload"])
    finally:
        torch.set_num_threads(threads)


def test_all_sides_are_measured_and_named(measured):
    report, table = measured
    assert set(table) == {(8, name) for name in (PLAIN, "fused", "fp16", "offload")}
    assert all(one.peak > 0 and one.seconds > 0 for one in table.values())
    claims = [row.claim for row in report.rows]
    assert len(claims) == len(set(claims)) == 2 * 4 + 3 * 3
    assert all(row.holds is None for row in report.rows), "nothing is promised at this size"


@pytest.mark.parametrize("items", [1_000, 200_000])
def test_bytes_are_those_of_a_real_step(items):
    """What a side saves of the whole step's peak, against turbogr.negative_bytes: with few and with many distinct rows."""
    sides = list(SIDES)
    table = measure(Report("x"), Host(), Shape("tiny", 1, 256, items, (256,), promised=False), 1, sides)
    plain = table[256, PLAIN]
    for name in sides[1:]:
        saved, computed = plain.peak - table[256, name].peak, plain.computed - table[256, name].computed
        assert saved == pytest.approx(computed, abs=0.05 * plain.peak), name
        assert saved > 0.2 * plain.peak, "and they differ by more than that"


def test_peaks_are_those_of_any_step_but_the_first():
    """Whichever side comes first, however often: what the first step makes and leaves behind is in nobody's peak."""
    shape = Shape("tiny", 1, 64, 1_000, (8,), promised=False)
    orders = ([PLAIN, "offload", "fused"], [PLAIN, "fused"])
    tables = [measure(Report("x"), Host(), shape, 1, names) for names in orders]
    for table in tables[1:]:
        assert {key: one.peak for key, one in table.items()} == {key: tables[0][key].peak for key in table}


def test_sharing_draws_a_part():
    batch = TINY.batch(8, seed=0)
    assert SIDES["sharing k = 2"].drawn(batch).negatives.shape == (batch.num_tokens, 4)
    assert torch.equal(SIDES["all three"].drawn(batch).negatives, batch.negatives[:, :4])
    assert torch.equal(SIDES["fused"].drawn(batch).negatives, batch.negatives)
    assert torch.equal(batch.lengths, torch.tensor([256])), "histories are full"


@pytest.mark.parametrize(("peak", "ratio", "holds"), [(300, 0.9, True), (500, 0.9, False), (300, 1.1, False)])
def test_promises_are_those_of_the_issue(peak, ratio, holds):
    report, shape = Report("x"), Shape("tiny", 1, 256, 20_000, (128,), promised=True)
    add_rows(report, shape, 128, {PLAIN: Measured(1000, 800, 2.0, 1.0), "fused": Measured(peak, 100, 2.0 * ratio, ratio)})
    rows = {row.claim.split(": fused, ")[-1]: row for row in report.rows if ": fused" in row.claim}
    assert rows["saved of plain's peak"].value == pytest.approx((1000 - peak) / 10)
    promised = [row for row in rows.values() if row.target]
    assert len(promised) == 2
    assert all(row.holds for row in promised) == holds
    add_rows(report, shape, 64, {PLAIN: Measured(1000, 800, 2.0, 1.0), "fused": Measured(999, 100, 9.0, 9.0)})
    assert sum(row.target is not None for row in report.rows) == 2, "of 128 negatives alone"


def test_the_page_has_a_line_for_each_number_of_negatives():
    one = Measured(500_000_000, 1, 1.5, 0.5)
    table = {(count, name): one for count in (32, 128) for name in (PLAIN, "offload")}
    lines = section({TINY: table}).splitlines()
    assert lines[0] == "FuXi-tiny, 1 x 256 tokens, 20,000 items:"
    assert lines[2:] == [
        "| negatives | plain | offload |",
        "| --- | ---: | ---: |",
        "| 32 | 0.50 GB, 1.50 s | 0.50 GB, -0 %, x 0.50 |",
        "| 128 | 0.50 GB, 1.50 s | 0.50 GB, -0 %, x 0.50 |",
    ]


@pytest.mark.parametrize("name", [Host.section, Cuda.section, "negatives of FuXi-large"])
def test_the_page_has_a_place_for_each_table(name):
    assert "what was measured" in with_section(PAGE.read_text(encoding="utf-8"), name, "what was measured")


def test_the_paper_is_met_where_it_measured():
    """Gathered embeddings beside the rest of Table 7, less what it offloads: one tensor [T, R, D]."""
    rest, growth = rest_of_the_paper()
    assert rest == pytest.approx(12.8, abs=0.05)
    assert growth == pytest.approx(0.2935, abs=0.001)
    for line in extrapolated(ITEMS[1:], (15,), tuple(TABLE_7)):
        plain, offloaded = TABLE_7[line.negatives]
        tensor = (line.gigabytes[GATHERED]) / 2
        assert plain - offloaded == pytest.approx(tensor, abs=0.8)
        assert rest + line.gigabytes[GATHERED] <= plain + 0.2, "the paper keeps more than two such tensors"
        assert line.saved("offload") > (plain - offloaded) / plain, "and leaves one on the device"


def test_the_extrapolated_table_has_all_choices():
    lines = extrapolated_table().splitlines()
    assert lines[0].startswith("| items | histories | negatives | gathered | fused |")
    assert len(lines) == 2 + 2 * 2 * 4
    assert {line.count("|") for line in lines} == {lines[0].count("|")}
    large = [line for line in extrapolated() if line.negatives == 512]
    assert all(line.gigabytes["offload"] < line.gigabytes["fused"] / 10 for line in large)


def test_the_gpus_way_of_measuring(monkeypatch):
    """As far as it can be followed without a GPU."""
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 350)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    gpu, calls = Cuda(), []
    assert gpu.peak(lambda: calls.append(1)) == 250
    assert gpu.seconds(lambda: calls.append(2)) >= 0
    assert calls == [1, 2]
    assert (gpu.name, gpu.shapes[0].size, gpu.scratch(TINY.batch(8, 0), SIDES["fused"])) == ("Some GPU", "medium", 0)


@pytest.mark.parametrize(
    ("copies", "kernels", "share"),
    [
        ([(0, 10)], [(0, 10)], 1.0),
        ([(0, 10)], [(10, 20)], 0.0),
        ([(0, 10)], [(5, 7), (6, 9)], 0.4),
        ([(0, 10), (20, 30)], [(25, 40), (-5, 5)], 0.5),
        ([(2, 4), (3, 6), (8, 9)], [(0, 3), (5, 20)], 0.6),
        ([], [(0, 1)], 1.0),
        ([(0, 4)], [], 0.0),
    ],
)
def test_the_share_of_copies_beside_kernels(copies, kernels, share):
    assert beside(copies, kernels) == pytest.approx(share)
    assert beside(reversed(copies), reversed(kernels)) == pytest.approx(share)
