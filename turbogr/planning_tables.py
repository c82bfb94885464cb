"""Prints a plan for people, and writes it for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from turbogr.costs import Plan, StepCost
from turbogr.errors import ConfigurationError
from turbogr.files import replace_file
from turbogr.sparse.table import ITEMS
from turbogr.units import in_bytes


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Prints the tables of a plan.

    Args:
        plan: what `turbogr.planning.plan` found.
        console: where to; None takes standard output.
    """
    console = console or Console(highlight=False)
    tables = [_parameters(plan), _epoch(plan)]
    if plan.steps:
        tables += [_operations(plan), _memory(plan), _negatives(plan)]
    for table in tables:
        console.print(table)
    for note in plan.notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)


def write_json(content: dict[str, Any], path: Path) -> None:
    """Writes numbers as JSON, under a temporary name first.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    if path.is_dir():
        raise ConfigurationError(f"--json {path}: is a folder; name a file in it")
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda partial: partial.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"--json {path}: cannot be written ({error.strerror or error})") from error


def _parameters(plan: Plan) -> Table:
    model = plan.model
    table = _table(f"Parameters of {model.backbone}", ("", "parameters", "bytes"))
    for part, count in model.dense.items():
        table.add_row(part, f"{count:,}", "")
    table.add_section()
    table.add_row("dense", f"{sum(model.dense.values()):,}", in_bytes(model.dense_bytes))
    for name, rows in model.tables.items():
        sparse = f"sparse: {_item_table(name)}, {rows:,} rows x {model.table_width}"
        table.add_row(sparse, f"{rows * model.table_width:,}", in_bytes(model.table_bytes * rows // model.table_rows))
    return table


def _epoch(plan: Plan) -> Table:
    data = plan.data
    title = f"An epoch: {data.users:,} users, {data.steps:,} steps, {data.tokens:,} tokens"
    table = _table(title, ("", "mean", "p50", "p99", "max"))
    for name, spread in (
        ("tokens of a user", data.history),
        ("tokens of a step", data.batch_tokens),
        ("causal pairs of a step", data.batch_pairs),
    ):
        table.add_row(name, *(f"{value:,.0f}" for value in (spread.mean, spread.p50, spread.p99, spread.most)))
    return table


def _operations(plan: Plan) -> Table:
    table = _table("FLOPs of a step", ("", *(f"{name} {way}" for name in plan.steps for way in ("forward", "backward"))))
    table.caption = Text("2 for a multiplication with its addition; elementwise work is not counted")
    steps = list(plan.steps.values())
    ways = [way for step in steps for way in (step.forward, step.backward)]
    for kind in dict.fromkeys(kind for way in ways for kind in way):
        table.add_row(kind, *(_flops(way.get(kind, 0)) for way in ways))
    table.add_section()
    table.add_row("all", *(_flops(sum(way.values())) for way in ways))
    for name, cells in (
        ("together", [_flops(step.operations) for step in steps]),
        ("if padded", [f"{_flops(step.padded)} (x {step.padded / step.operations:.1f})" for step in steps]),
    ):
        table.add_row(name, *(cell for text in cells for cell in ("", text)))
    return table


def _memory(plan: Plan) -> Table:
    steps, model = list(plan.steps.values()), plan.model
    table = _table(f"Memory at precision {plan.precision}", ("", *plan.steps))
    table.caption = Text("peak: activations and gradients; workspaces inside operators come on top")
    table.add_row("users x longest history", *(f"{step.users:,} x {step.longest:,}" for step in steps))
    table.add_row("tokens", *(f"{step.tokens:,}" for step in steps))
    table.add_section()

    def add(name: str, sizes: Sequence[int]) -> None:
        table.add_row(name, *(in_bytes(size) for size in sizes))

    always = [
        ("dense parameters", model.dense_bytes),
        (f"state of {model.optimizer}", model.optimizer_bytes),
        ("item table" if len(model.tables) == 1 else "tables", model.table_bytes),
        (f"state of {model.table_optimizer}", model.table_optimizer_bytes),
    ]
    if model.item_rows_bytes:
        always.append(("rows of items' features", model.item_rows_bytes))
    for name, size in always:
        add(name, [size] * len(steps))
    add("batch", [step.batch_bytes for step in steps])
    add("peak in a step", [step.most_bytes for step in steps])
    table.add_section()
    add("on the device", [plan.total_bytes(step) for step in steps])
    add("data on the host", [plan.host_bytes(step) for step in steps])
    table.add_section()
    for part in dict.fromkeys(part for step in steps for part in step.kept):
        add(f"activations kept: {part}", [step.kept.get(part, 0) for step in steps])
    add("  of the backbone, a token", [_a_token(step) for step in steps])
    add("gradients: dense", [model.dense_bytes] * len(steps))
    table.add_row("gradients: rows", *(f"{step.distinct_rows:,} rows, {in_bytes(step.row_gradient_bytes)}" for step in steps))
    table.add_row("negatives: ids, places", *(f"{step.negatives:,} a token, {in_bytes(step.negative_bytes)}" for step in steps))
    return table


def _negatives(plan: Plan) -> Table:
    steps = list(plan.steps.values())
    table = _table("Negatives on the device, by how they are kept", ("", *plan.steps))
    table.caption = Text("ids, rows, gradients, logits; sharing looks up fewer for as many logits (docs/negatives.md)")
    table.add_row("drawn", *(f"{step.negatives:,} a token" for step in steps))
    table.add_row("distinct rows of the batch", *(f"{step.distinct_rows:,}" for step in steps))
    table.add_section()
    names = list(steps[0].negative_choices)
    for name in names:
        table.add_row(name, *(in_bytes(step.negative_choices[name].device) for step in steps))
    table.add_section()
    for name in (name for name in names if any(step.negative_choices[name].host for step in steps)):
        table.add_row(f"on the host: {name}", *(in_bytes(step.negative_choices[name].host) for step in steps))
    table.add_section()
    below = (in_bytes(step.offload_below) if step.offload_below else "never" for step in steps)
    table.add_row("mode auto offloads on a device of less than", *below)
    return table


def _item_table(name: str) -> str:
    return "item table" if name == ITEMS else f"table of {name}"


def _a_token(step: StepCost) -> int:
    return step.kept.get("backbone", 0) // max(step.tokens, 1)


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=Text(title), title_justify="left", title_style="bold", caption_justify="left")
    for index, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if index else "left", overflow="fold")
    return table


def _flops(count: int) -> str:
    """Four digits at most: 931 M, 1.10 G."""
    size = float(count)
    for unit in ("", " k", " M", " G", " T"):
        if size < 1000:
            return f"{size:.3g}{unit}"
        size /= 1000
    return f"{size:,.3g} P"
