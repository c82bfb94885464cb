"""What a run looks like: report.png, test.png, timeline.png, load_balance.png."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from turbogr.callbacks.intervals import Intervals
from turbogr.callbacks.throughput import METRIC as TOKENS_PER_SECOND
from turbogr.files import replace_file
from turbogr.tracing import Span

BLUE, ORANGE, GREY, LIGHT, INK = "#2563eb", "#d9480f", "#7b8794", "#e4e7eb", "#1f2933"
BATCH_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#eeca3b", "#9d755d")


def draw_report(rows: Sequence[dict[str, float]], best: dict[str, float] | None, path: Path, title: str) -> None:
    """Draws loss, HR@10, NDCG@10 and tokens/s over steps; if K = 10 is not measured, the smallest K is shown.

    Args:
        rows: of metrics.csv.
        best: the row of the best validation, marked in the plots of validation metrics.
        path: PNG to write.
        title: of the figure.
    """
    names = set().union(*rows)
    loss = next((name for name in ("train/loss", "train/loss_step", "train/loss_epoch") if name in names), "train/loss")
    k = _shown_k(names)
    panels = [
        (loss, "Training loss", "last {:.3f}"),
        (f"val/HR@{k}", f"HR@{k}, validation", "best checkpoint {:.4f}"),
        (f"val/NDCG@{k}", f"NDCG@{k}, validation", "best checkpoint {:.4f}"),
        (TOKENS_PER_SECOND, "Tokens per second", "median {:,.0f}"),
    ]
    figure = _figure((10, 6.6), title)
    last = max((row["step"] for row in rows), default=1)
    for axes, (name, label, note) in zip(figure.subplots(2, 2, sharex=True).flat, panels, strict=True):
        points = [(row["step"], row[name]) for row in rows if name in row]
        _style(axes, label)
        axes.set_xlim(0, max(last, 1) * 1.02)
        if not points:
            axes.set_yticks([])
            axes.text(0.5, 0.5, "nothing logged", transform=axes.transAxes, ha="center", color=GREY)
            continue
        steps, values = np.array(points).T
        validation = name.startswith("val/")
        reach = 0 if validation else len(values) // 40
        smooth = np.array([values[max(i - reach, 0) : i + reach + 1].mean() for i in range(len(values))])
        if reach:
            axes.plot(steps, values, color=BLUE, linewidth=0.8, alpha=0.3)
        axes.plot(steps, smooth, color=BLUE, linewidth=1.8, marker="o" if len(steps) < 40 else None, markersize=3.5)
        number = float(np.median(values)) if name == TOKENS_PER_SECOND else smooth[-1]
        if validation and best is not None and name in best:
            number = best[name]
            axes.plot(best["step"], number, "o", markersize=8, color=ORANGE, markeredgecolor="white", markeredgewidth=1.5)
        axes.set_title(note.format(number), loc="right", fontsize=9.5, color=ORANGE if validation else GREY)
        if name != loss:
            axes.set_ylim(0, max(values.max() * 1.12, 1e-9))
        if values.max() >= 1000:
            axes.yaxis.set_major_formatter("{x:,.0f}")
    for axes in figure.axes[2:]:
        axes.set_xlabel("step", fontsize=9, color=INK)
        axes.xaxis.set_major_formatter("{x:,.0f}")
    replace_file(path, lambda temporary: figure.savefig(temporary, format="png"))


def draw_test(results: dict[str, dict[str, float]], k: int, path: Path, title: str) -> None:
    """Draws test HR@K and NDCG@K of the model and the baselines as bars.

    Args:
        results: {"model": {"HR@10": ...}, "popularity": ..., "random": ...}.
        k: the K shown.
        path: PNG to write.
        title: of the figure.
    """
    figure = _figure((9, 1.0 + 0.5 * len(results)), title)
    names = list(results)
    for axes, metric in zip(figure.subplots(1, 2, sharey=True), (f"HR@{k}", f"NDCG@{k}"), strict=True):
        values = [results[name].get(metric, 0.0) for name in names]
        _style(axes, f"{metric}, test")
        axes.grid(visible=False)
        bars = axes.barh(names, values, color=[BLUE if name == "model" else "#b8c2cc" for name in names], height=0.62)
        axes.bar_label(bars, [f"{value:.4f}" for value in values], padding=5, fontsize=10, color=INK)
        axes.set_xlim(0, max(max(values) * 1.22, 1e-9))
        axes.spines["bottom"].set_visible(False)
        axes.set_xticks([])
        axes.tick_params(axis="y", labelsize=10, length=0)
    figure.axes[0].invert_yaxis()
    replace_file(path, lambda temporary: figure.savefig(temporary, format="png"))


def draw_timeline(
    rows: Sequence[tuple[str, Sequence[Span]]],
    starts: Sequence[float],
    first: int,
    parts: dict[str, Intervals],
    path: Path,
    title: str,
) -> None:
    """Draws spans of a few steps: a row a resource, a colour a batch, and below them what each moment counts as.

    Args:
        rows: name and spans, from the top; what lies within another span is drawn over it.
        starts: when each step began, and when the last one ended.
        first: batch of the first step.
        parts: what it counts as, and when: computing, exposed communication, idle, in this order.
        path: PNG to write.
        title: of the figure.
    """
    origin, end = starts[0], starts[-1]
    figure = _figure((14, 1.6 + 0.42 * (len(rows) + 1)), title)
    axes = figure.subplots()
    _style(axes, "")
    axes.grid(visible=False)
    batches = set()
    for height, (_, spans) in enumerate(rows):
        for span in spans:
            left, right = (1e3 * (min(max(moment, origin), end) - origin) for moment in (span.start, span.end))
            if span.resource == "wait":
                look: dict[str, Any] = {"color": "white", "edgecolor": GREY, "hatch": "//////", "linewidth": 0.0}
            else:
                look = {"color": _batch_colour(span.batch), "edgecolor": "white", "linewidth": 0.4}
                batches.add(span.batch)
            axes.barh(height, right - left, left=left, height=0.8, **look)
            if span.resource != "wait" and right - left > 4.5e-3 * (len(span.name) + 1) * 1e3 * (end - origin):
                axes.text(left, height, f" {span.name}", va="center", fontsize=6.5, color="white", clip_on=True)
    for (_, intervals), colour in zip(parts.items(), (BLUE, ORANGE, LIGHT), strict=True):
        spread = [(1e3 * (start - origin), 1e3 * (stop - start)) for start, stop in intervals]
        axes.broken_barh(spread, (len(rows) - 0.2, 0.5), facecolors=colour)
    for index, start in enumerate(starts):
        axes.axvline(1e3 * (start - origin), color=INK, linewidth=0.6, linestyle=":")
        if start < end and len(starts) <= 17:
            axes.text(1e3 * (start - origin), -0.55, f" step of batch {first + index}", fontsize=7, color=GREY, va="bottom")
    axes.set_xlim(0, 1e3 * (end - origin))
    axes.set_ylim(len(rows) + 0.4, -0.9)
    axes.set_yticks(range(len(rows) + 1), [*(name for name, _ in rows), "counts as"])
    axes.set_xlabel("ms", fontsize=9, color=INK)
    handles = [Patch(color=_batch_colour(batch), label=f"batch {names}") for batch, names in _legend(sorted(batches - {-1}))]
    handles.append(Patch(facecolor="white", edgecolor=GREY, hatch="//////", linewidth=0.0, label="waiting"))
    handles += [Patch(color=colour, label=name) for name, colour in zip(parts, (BLUE, ORANGE, LIGHT), strict=True)]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 7), fontsize=7.5, frameon=False)
    replace_file(path, lambda temporary: figure.savefig(temporary, format="png"))


def draw_balance(panels: dict[str, dict[str, Sequence[float]]], path: Path, title: str) -> None:
    """Draws how often steps were how unequal: a panel a measure, a histogram for each way of sharing batches out.

    Args:
        panels: measure -> way -> its value in each step; the last way is the one that was trained.
        path: PNG to write.
        title: of the figure.
    """
    figure = _figure((11, 3.6), title)
    for axes, (measure, ways) in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels.items(), strict=True):
        _style(axes, measure)
        values = [np.asarray(way, dtype=np.float64) for way in ways.values()]
        edges = np.linspace(0.0, max(1e-9, *(value.max() for value in values)), 41)
        colours = [*("#b8c2cc",) * (len(ways) - 1), BLUE]
        for name, value, colour in zip(ways, values, colours, strict=True):
            axes.hist(value, edges, color=colour, alpha=0.8, label=f"{name}: mean {value.mean():,.4g}")
        axes.set_ylabel("steps", fontsize=9, color=INK)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(0, axes.get_ylim()[1] * (1.08 + 0.14 * len(ways)))  # room for the legend
        axes.legend(loc="upper right", fontsize=7.5, frameon=False)
    replace_file(path, lambda temporary: figure.savefig(temporary, format="png"))


def _batch_colour(batch: int) -> str:
    return GREY if batch < 0 else BATCH_COLOURS[batch % len(BATCH_COLOURS)]


def _legend(batches: Sequence[int]) -> list[tuple[int, str]]:
    """One entry a colour: its first batch, and the names of all that share it."""
    found: dict[str, list[int]] = {}
    for batch in batches:
        found.setdefault(_batch_colour(batch), []).append(batch)
    return [(same[0], ", ".join(map(str, same[:3])) + (", …" if len(same) > 3 else "")) for same in found.values()]


def _figure(size: tuple[float, float], title: str) -> Figure:
    figure = Figure(figsize=size, dpi=150, facecolor="white")
    figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.1, wspace=0.04, hspace=0.06)
    figure.suptitle(title, x=0.015, ha="left", fontsize=12, fontweight="bold", color=INK)
    return figure


def _style(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10.5, color=INK)
    axes.grid(axis="y", color=LIGHT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8.5, colors=INK, length=3, color=LIGHT)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(LIGHT)


def _shown_k(names: Iterable[str]) -> int:
    found = sorted(int(name.removeprefix("val/HR@")) for name in names if name.startswith("val/HR@"))
    return 10 if 10 in found or not found else found[0]
