"""Tables and picture of a prepared folder."""

import json

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from tests.data.make import write_prepared
from turbogr.data.describe import _draw, describe, print_manifest
from turbogr.data.manifest import read_manifest
from turbogr.errors import DataError


def table_text(manifest, path) -> str:
    with open("/dev/null", "w") as sink:
        console = Console(width=160, record=True, file=sink)
        print_manifest(manifest, path, console)
        return console.export_text()


def change(folder, **keys) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | keys))


def test_tables_hold_every_number_of_the_manifest(tmp_path):
    folder = write_prepared(tmp_path / "data[1]", num_users=40, num_items=30)  # brackets are markup to rich
    change(
        folder,
        counts=[
            {"step": "read", "events": 12345, "users": 678, "items": 90},
            {"step": "5-core", "events": 2469, "users": 41, "items": 30},
        ],
        options={"core": 5, "signals": ["is_click", "is_like"], "where": "[a]"},
        files=[{"path": "log.csv", "bytes": 1234567, "sha256": "ab12" * 16}],
        too_short=17,
        length_percentiles={"min": 3, "p10": 4.5, "p50": 11, "p90": 19, "p99": 20, "max": 20, "mean": 11.25},
    )
    text = table_text(read_manifest(folder), folder)
    for expected in (
        "data[1]", "12,345", "678", "90", "2,469", "20.0%", "is_click, is_like", "[a]", "log.csv", "1,234,567",
        "ab12ab12ab12ab12…", "17", "4.5", "11.2", "three_way", "sha256:",
    ):  # fmt: skip
        assert expected in text, expected


def test_an_empty_log_of_steps_is_shown(tmp_path):
    folder = write_prepared(tmp_path / "data", num_users=4, num_items=5)
    change(folder, counts=[])
    assert "What each step left" in table_text(read_manifest(folder), folder)


def test_picture_is_written_and_said(tmp_path, capsys):
    folder = write_prepared(tmp_path / "data", num_users=200, num_items=300, max_len=60)
    before = {path.name for path in folder.iterdir()}
    assert describe(folder) == folder / "describe.png"
    assert str(folder / "describe.png") in capsys.readouterr().out.replace("\n", "")
    assert {path.name for path in folder.iterdir()} - before == {"describe.png"}, "no temporary file is left"
    picture = imread(folder / "describe.png")
    assert picture.shape[1] > 1200
    assert picture[..., :3].std() > 0.05, "the picture is not blank"

    elsewhere = tmp_path / "elsewhere.png"
    assert describe(folder, elsewhere) == elsewhere
    np.testing.assert_array_equal(imread(elsewhere), picture)


def test_histogram_counts_every_user_and_curve_every_item():
    lengths = np.random.default_rng(0).integers(3, 900, 5000)
    popularity = np.sort(np.random.default_rng(1).zipf(1.5, 4000).clip(max=10**6))[::-1]
    left, right = _draw(lengths, popularity, "x").axes
    heights, edges, _ = left.patches[0].get_data()
    assert (heights * np.log2(edges[1:] / edges[:-1])).sum() == pytest.approx(5000)
    assert edges[0] <= lengths.min() < lengths.max() < edges[-1]
    ranks, counts = right.lines[0].get_data()
    assert (ranks[0], ranks[-1]) == (1, 4000)
    np.testing.assert_array_equal(counts, popularity[ranks - 1])
    labels = " ".join(text.get_text() for text in left.texts)
    assert f"median {np.percentile(lengths, 50):.3g}" in labels
    share = popularity[:40].sum() / popularity.sum()
    assert f"top 1% of items: {share:.1%}" in right.texts[0].get_text()


@pytest.mark.parametrize(
    ("lengths", "popularity"),
    [([3], [3]), ([7] * 50, [350]), ([3, 3, 228_000], [228_005, 1]), ([5, 6], [11] + [0] * 5)],
    ids=["one user, one item", "equal lengths", "an extreme user", "items without events"],
)
def test_extreme_folders_are_drawn(tmp_path, lengths, popularity):
    figure = _draw(np.array(lengths), np.array(popularity), "x")
    figure.savefig(tmp_path / "x.png")
    for axes in figure.axes:
        assert np.isfinite([*axes.get_xlim(), *axes.get_ylim()]).all()


def test_folder_that_is_not_prepared_is_refused(tmp_path):
    with pytest.raises(DataError, match="not a prepared folder"):
        describe(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_picture_that_cannot_be_written_is_refused(tmp_path):
    folder = write_prepared(tmp_path / "data", num_users=4, num_items=5)
    with pytest.raises(DataError, match=r"absent.x\.png: the picture cannot be written.*--png"):
        describe(folder, tmp_path / "absent" / "x.png")
