"""What a run looks like: report.png and test.png."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from turbogr.callbacks.throughput import METRIC as TOKENS_PER_SECOND

BLUE, ORANGE, GREY, LIGHT, INK = "#2563eb", "#d9480f", "#7b8794", "#e4e7eb", "#1f2933"


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


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Writes a file under a temporary name and renames it.

    Args:
        path: the file.
        write: called with the temporary path.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
