"""Shows what a prepared folder holds: its counts and options as tables, its lengths and popularities as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from turbogr.data.prepared import PreparedData
from turbogr.errors import DataError
from turbogr.files import replace_file

_PROTOCOLS = {
    "three_way": "three_way: last event test, last but one validation, the rest training",
    "published": "published: last event test and validation, the rest training",
}
_PERCENTILES = ("min", "p10", "p50", "p90", "p99", "max", "mean")
_BINS_PER_DOUBLING = 4
_FREQUENT = 3  # values of a feature that are shown
_INK, _MUTED, _GRID, _LENGTHS, _ITEMS = "#1f2933", "#616e7c", "#e4e7eb", "#2f6f9f", "#b4532a"


def describe(path: Path, png: Path | None = None) -> Path:
    """Print a prepared folder's counts, lengths and options, and draw its distributions.

    Args:
        path: Folder that ``turbogr data prepare`` wrote.
        png: Picture to write; None takes ``describe.png`` in the folder.

    Returns:
        Path of the picture: users by history length, and items by rank of popularity.

    Raises:
        DataError: The folder is not a prepared one, or the picture cannot be written.
    """
    data = PreparedData.open(path)
    print_manifest(data.manifest, data.path)
    png = png or data.path / "describe.png"
    _save(_draw(np.diff(data.offsets), _popularity(data), f"{data.path.resolve().name} ({data.manifest['source']})"), png)
    Console(highlight=False, markup=False, soft_wrap=True).print(f"written to {png}")
    return png


def print_manifest(manifest: dict[str, Any], path: Path, console: Console | None = None) -> None:
    """Print the tables of a manifest.

    Args:
        manifest: As :func:`turbogr.data.manifest.read_manifest` gives it.
        path: The prepared folder, for the title.
        console: Where to print; None takes standard output.
    """
    console = console or Console(highlight=False)
    events, users, items = (manifest[f"num_{what}"] for what in ("events", "users", "items"))
    files = manifest["files"]
    facts = {
        "source": manifest["source"],
        "users": f"{users:,}",
        "items": f"{items:,}",
        "events": f"{events:,}  ({events / items:,.1f} an item, {events / (users * items):.2%} of all pairs)",
        "split": _PROTOCOLS[manifest["protocol"]],
        "time unit": manifest["time_unit"],
        "users too short to split": f"{manifest['too_short']:,}",
        "content": manifest["content_hash"],
        "prepared by": f"turbogr {manifest['turbogr']}",
    }
    console.print(_table(str(path), ("", ""), facts.items(), left=2))

    first = manifest["counts"][0]["events"] if manifest["counts"] else 0
    steps = [
        (
            step["step"],
            *(f"{step[what]:,}" for what in ("events", "users", "items")),
            f"{step['events'] / first:.1%}" if first else "",
        )
        for step in manifest["counts"]
    ]
    console.print(_table("What each step left", ("step", "events", "users", "items", "events kept"), steps))

    lengths = manifest["length_percentiles"]
    row = [f"{lengths[name]:,.1f}".removesuffix(".0") for name in _PERCENTILES if name in lengths]
    console.print(_table("Events of a user", [name for name in _PERCENTILES if name in lengths], [row], left=0))

    if manifest.get("features"):
        columns = ("feature", "of", "most frequent", "rows", "missing")
        rows = [_feature(feature, path) for feature in manifest["features"]]
        console.print(_table("Features", columns, rows, left=3))

    options = [(name, _plain(value)) for name, value in sorted(manifest["options"].items())]
    console.print(_table("Options", ("option", "value"), options, left=2))
    rows = [(file["path"], f"{file['bytes']:,}", file["sha256"].removeprefix("sha256:")[:16] + "…") for file in files]
    console.print(_table("Source files", ("file", "bytes", "sha256"), rows))


def _table(title: str, columns: Sequence[str], rows: Any, left: int = 1) -> Table:
    """A table whose first ``left`` columns are texts and the others numbers."""
    # Paths and options may hold brackets, which rich would read as markup.
    table = Table(title=Text(title), title_justify="left", title_style="bold", show_header=any(columns))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    return table


def _feature(feature: dict[str, Any], path: Path) -> tuple[str, ...]:
    """The row of a feature: its size, how much is missing, and its most frequent values."""
    table = pq.read_table(path / feature["map"], columns=["value", "count"])
    counts = table["count"].to_numpy()
    most = 1 + np.argsort(-counts[1:], kind="stable")[:_FREQUENT]
    values = table["value"].take(pa.array(most)).to_pylist()
    shown = ", ".join(f"{value} ({counts[row] / counts.sum():.1%})" for value, row in zip(values, most, strict=True))
    return feature["name"], f"{feature['side']}s", shown, f"{feature['rows']:,}", f"{counts[0] / counts.sum():.1%}"


def _plain(value: Any) -> str:
    if value is None:
        return "not set"
    if value == []:
        return "none"
    return ", ".join(str(part) for part in value) if isinstance(value, list) else str(value)


def _popularity(data: PreparedData) -> np.ndarray:
    """Events of every item, most popular first: int64 [V]."""
    file = data.path / data.manifest["maps"]["items"]
    events = pq.read_table(file, columns=["events"])["events"].to_numpy()
    return np.sort(events)[::-1]


def _draw(lengths: np.ndarray, popularity: np.ndarray, title: str) -> Figure:
    # A figure of its own instead of pyplot's: no window system, no global state.
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08, wspace=0.06)
    figure = Figure(figsize=(10.5, 4.5), dpi=160, layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    figure.suptitle(
        f"{title}: {len(lengths):,} users, {len(popularity):,} items, {int(lengths.sum()):,} events",
        fontsize=11.5, color=_INK, x=0.012, ha="left", fontweight="bold",
    )  # fmt: skip
    _draw_lengths(left, lengths)
    _draw_popularity(right, popularity)
    return figure


def _style(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=10.5, color=_INK, loc="left", pad=27)
    axes.set_xlabel(x, fontsize=9.5, color=_INK)
    axes.set_ylabel(y, fontsize=9.5, color=_INK)
    axes.tick_params(labelsize=8.5, colors=_MUTED, which="both", length=3)
    axes.grid(visible=True, which="major", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_MUTED)


def _draw_lengths(axes: Axes, lengths: np.ndarray) -> None:
    """Histogram over whole-number bins that widen by a constant factor; heights are per doubling, so widths do not matter."""
    low, high = int(lengths.min()), int(lengths.max())
    count = max(1, round(np.log2((high + 1) / low) * _BINS_PER_DOUBLING))
    edges = np.unique(np.rint(np.geomspace(low, high + 1, count + 1)).astype(np.int64))
    heights = np.histogram(lengths, edges)[0] / np.log2(edges[1:] / edges[:-1])
    axes.stairs(heights, edges, fill=True, color=_LENGTHS, alpha=0.32)
    axes.stairs(heights, edges, color=_LENGTHS, linewidth=1.4)
    axes.set_xscale("log")
    axes.set_ylim(0, heights.max() * 1.06)
    _decades(axes, "x", edges[0], edges[-1])
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(_short))
    _style(axes, "Length of histories", "events of a user", "users per doubling of the length")
    marks: dict[float, list[str]] = {}
    for name in (10, 50, 90, 99):
        marks.setdefault(float(np.percentile(lengths, name)), []).append("median" if name == 50 else f"p{name}")
    # A label that would touch the one before it goes on a second line above the axes.
    end, row, span = -np.inf, 0, np.log(edges[-1] / edges[0])
    for value, names in sorted(marks.items()):
        text = f"{', '.join(names)} {_short(value)}"
        middle, half = np.log(value / edges[0]) / span, 0.0075 * len(text)
        row = 1 - row if middle - half < end else 0
        end = middle + half
        axes.axvline(value, color=_INK, linewidth=0.9, linestyle=(0, (4, 3)), alpha=0.75)
        axes.annotate(
            text, (value, 1), xycoords=("data", "axes fraction"), xytext=(0, 3 + 9.5 * row), textcoords="offset points",
            ha="center", va="bottom", fontsize=8, color=_INK,
        )  # fmt: skip


def _draw_popularity(axes: Axes, popularity: np.ndarray) -> None:
    """Events by rank, at ranks spaced evenly on the logarithmic axis, so that millions of items make no larger picture."""
    popularity = popularity[popularity > 0]  # a logarithmic axis has no zero
    ranks = np.unique(np.rint(np.geomspace(1, len(popularity), 2000)).astype(np.int64))
    axes.plot(ranks, popularity[ranks - 1], color=_ITEMS, linewidth=1.8, solid_capstyle="round")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.fill_between(ranks, popularity[ranks - 1], popularity[-1], color=_ITEMS, alpha=0.10, linewidth=0)
    _decades(axes, "x", 1, len(popularity))
    _decades(axes, "y", popularity[-1], popularity[0])
    axes.set_ylim(popularity[-1] * 0.85, popularity[0] * 1.4)
    _style(axes, "Popularity of items", "rank of the item", "events of the item")
    share = np.cumsum(popularity) / popularity.sum()
    lines = ["share of all events"]
    for part in (0.001, 0.01, 0.1):
        if len(popularity) * part >= 1:
            lines.append(f"top {100 * part:g}% of items: {share[round(len(popularity) * part) - 1]:.1%}")
    if len(lines) > 1:
        axes.text(
            0.04, 0.06, "\n".join(lines), transform=axes.transAxes, fontsize=8.5, color=_INK, va="bottom", linespacing=1.5,
            bbox={"facecolor": "white", "edgecolor": _GRID, "boxstyle": "round,pad=0.5"},
        )  # fmt: skip


def _decades(axes: Axes, which: str, low: float, high: float) -> None:
    """Tick a logarithmic axis with plain numbers; a short axis also gets 2 and 5."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1.0,) if high > low * 300 else (1.0, 2.0, 5.0), numticks=20))
    axis.set_major_formatter(FuncFormatter(_short))
    axis.set_minor_formatter(NullFormatter())


def _short(value: float, _position: int | None = None) -> str:
    """A count in at most four characters or so: 950, 1.5k, 32M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _save(figure: Figure, png: Path) -> None:
    try:
        replace_file(png, lambda file: figure.savefig(file, format="png"))
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{png}: the picture cannot be written ({reason}); give another place with --png") from error
