"""Timeline: what a step is made of, and what hides behind what, as a picture and as a file for trace viewers."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from rich.table import Table

from turbogr.callbacks.drawing import draw_timeline
from turbogr.callbacks.intervals import Parts, Shares, divide, step_shares
from turbogr.callbacks.terminal import print_table, shown
from turbogr.errors import ConfigurationError
from turbogr.files import replace_file
from turbogr.tracing import Span, Trace

RESOURCES = ("data", "unique", "communication", "compute")
FILLING = 4
"""Batches of an epoch, or after a validation, before the pipeline is filled."""
_AFTER = 2
"""Batches after the last one of a window, in which that which it began comes to its end."""
# Of the colours that chrome://tracing knows; other viewers choose their own.
_CHROME_COLOURS = (
    "thread_state_running",
    "thread_state_iowait",
    "rail_response",
    "rail_animation",
    "rail_load",
    "startup",
    "thread_state_runnable",
    "rail_idle",
)


@dataclass(frozen=True)
class Track:
    """A row of the picture.

    Attributes:
        resource: what is occupied.
        name: of the row; a resource that was used twice at a time has several.
        spans: by their start; one lies within another, or they are disjoint.
    """

    resource: str
    name: str
    spans: list[Span]


@dataclass(frozen=True)
class Window:
    """Consecutive training batches of one epoch, and what was done meanwhile.

    Attributes:
        epoch: from 0.
        first: index of the first batch in its epoch.
        starts: [steps + 1], when each step began, and when the last one ended; seconds of `time.perf_counter`.
        spans: all that touch this time, and some around it.
    """

    epoch: int
    first: int
    starts: list[float]
    spans: list[Span]

    @property
    def steps(self) -> int:
        """How many."""
        return len(self.starts) - 1

    @property
    def shares(self) -> Shares:
        """Of all its time."""
        return step_shares(self.spans, self.starts[0], self.starts[-1])

    @property
    def parts(self) -> Parts:
        """What each moment counts as."""
        return divide(self.spans, self.starts[0], self.starts[-1])

    def describe(self) -> str:
        """Which steps these are; people count epochs from 1."""
        return f"batches {self.first} to {self.first + self.steps - 1} of epoch {self.epoch + 1}"

    def touching(self) -> list[Span]:
        """The spans without those around it."""
        return [span for span in self.spans if span.end > self.starts[0] and span.start < self.starts[-1]]


class Timeline(Callback):
    """Records some steps of the pipeline of TurboGRStrategy, draws them, and says what share of their time was lost.

    After the window the run folder holds

    - timeline.json, to be opened in Perfetto (ui.perfetto.dev) or chrome://tracing: rows for data, unique, communication and
      compute, every span with its batch;
    - timeline.png: the same rows with a colour a batch, and below them what each moment counts as.

    At the end a table gives the shares of the steps' time as the paper's tables 5 and 6 define them: computing, communication
    that no computation hides, and idle; `turbogr.callbacks.intervals` says exactly what counts as what.

    The window lies within one epoch, clear of a validation, and begins where the pipeline is filled. Where no `steps` batches
    on end are such, the longest stretch there was is taken. Times are those of the host: with an accelerator that is given its
    work ahead they say when it was given, and the device's own profiler says when it was done.

    Args:
        first_step: batches of this `fit` before the window; the first ones compile and warm up.
        steps: batches in the window.
        path: of the JSON file, the picture beside it; None is timeline.json in the run folder
            (`Trainer(default_root_dir=...)`).
        all_ranks: every rank writes its own, timeline-rank-0.json and so on; otherwise rank 0 alone writes. The table is that
            of rank 0.

    Attributes:
        window: what was recorded; None until then, and on ranks that record nothing.

    Raises:
        ConfigurationError: an option is out of range, or `fit` is run under another strategy, whose steps are not recorded.
    """

    def __init__(self, first_step: int = 20, steps: int = 8, path: str | Path | None = None, all_ranks: bool = False) -> None:
        if first_step < 0 or steps < 1:
            raise ConfigurationError(
                f"Timeline: first_step ({first_step}) must be 0 or more, and steps ({steps}) must be 1 or more"
            )
        if path is not None and Path(path).suffix != ".json":
            raise ConfigurationError(f"Timeline: path is {path}; it must end in .json (the picture stands beside it, in .png)")
        self.first_step, self.steps, self.all_ranks = first_step, steps, all_ranks
        self.path = None if path is None else Path(path)
        self.window: Window | None = None
        self._trace = Trace()
        self._done = True
        self._starts: list[float] = []
        self._first = self._batches = self._since = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Tells the strategy that it will be watched, before it is set up."""
        if stage != "fit":
            return
        trace = getattr(trainer.strategy, "trace", None)
        if not isinstance(trace, Trace):
            raise ConfigurationError(
                "Timeline shows the steps of TurboGRStrategy, and this run has another strategy: set trainer.strategy to "
                "turbogr (it works on one rank, too), or leave Timeline out"
            )
        # On all ranks alike: it decides how dense gradients are reduced.
        trace.wanted = True
        self._trace = trace

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts to count."""
        self.window, self._starts = None, []
        self._batches = self._since = 0
        self._done = bool(getattr(trainer, "fast_dev_run", False)) or not (trainer.is_global_zero or self.all_ranks)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Opens the window, counts its steps, and closes it."""
        if self._done:
            return
        if self._starts or (self._batches >= self.first_step and self._since >= FILLING):
            if not self._starts:
                self._first, self._trace.active = batch_idx, True
                self._trace.take()
            self._starts.append(perf_counter())
            if len(self._starts) > self.steps + _AFTER:
                self._close(trainer)
        self._batches += 1
        self._since += 1

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """No steady state goes through a validation."""
        self._interrupt(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Nor from one epoch to the next."""
        self._interrupt(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes what there is, if the window never came."""
        self._interrupt(trainer)
        if not self._done and self.window is not None:
            self._write(trainer, self.window)
        self._done = True

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stops recording."""
        self._trace.active, self._done = False, True

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prints the table, after the progress bar has gone."""
        if stage != "fit" or not trainer.is_global_zero or getattr(trainer, "fast_dev_run", False):
            return
        if self.window is None:
            rank_zero_warn(
                f"Timeline: nothing was recorded in {self._batches} batches: it waits for {self.first_step} batches "
                f"(first_step) and, after an epoch's start or a validation, for {FILLING}"
            )
            return
        path = self._target(trainer)
        lines = [f"written: {shown(path)} (open it in ui.perfetto.dev or chrome://tracing)"]
        lines.append(f"written: {shown(path.with_suffix('.png'))}")
        if trainer.strategy.root_device.type != "cpu":
            lines.append("Times are the host's: what the device did when, its own profiler knows.")
        print_table(f"Timeline of {self.window.describe()}, rank 0 of {trainer.world_size}", _table(self.window), *lines)

    def _interrupt(self, trainer: Trainer) -> None:
        self._since = 0
        if self._starts:
            if len(self._starts) <= self.steps:
                self._starts.append(perf_counter())
            self._close(trainer)

    def _close(self, trainer: Trainer) -> None:
        """Ends the recording; keeps it where it is the longest so far."""
        self._trace.active = False
        found = Window(trainer.current_epoch, self._first, self._starts[: self.steps + 1], self._trace.take())
        self._starts = []
        if self.window is None or found.steps > self.window.steps:
            self.window = found
        if found.steps == self.steps:
            # Now, not at the end of training, which may be days away.
            self._write(trainer, found)
            self._done = True

    def _write(self, trainer: Trainer, window: Window) -> None:
        path, rank, ranks = self._target(trainer), trainer.global_rank, trainer.world_size
        path.parent.mkdir(parents=True, exist_ok=True)
        written = chrome_trace(window, rank, ranks)
        replace_file(path, lambda temporary: temporary.write_text(json.dumps(written), encoding="utf-8"))
        title = f"{window.describe()[0].upper()}{window.describe()[1:]}, rank {rank} of {ranks}"
        rows = [(track.name, track.spans) for track in tracks(window.touching())]
        parts = dict(zip(("computing", "exposed communication", "idle"), window.parts, strict=True))
        draw_timeline(rows, window.starts, window.first, parts, path.with_suffix(".png"), title)

    def _target(self, trainer: Trainer) -> Path:
        path = self.path or Path(trainer.default_root_dir) / "timeline.json"
        if self.all_ranks and trainer.world_size > 1:
            path = path.with_name(f"{path.stem}-rank-{trainer.global_rank}{path.suffix}")
        return path


def tracks(spans: Sequence[Span]) -> list[Track]:
    """Sorts spans into rows: at least one for every resource, several where it is used twice at a time.

    What a thread computes, and what it waits for meanwhile, share a row. Communication, which goes on beside threads, gets as
    many rows as there are communications at a time.
    """
    found = []
    for resource in RESOURCES:
        mine = [s for s in spans if s.resource == resource or (s.resource, resource) == ("wait", "compute")]
        mine.sort(key=lambda span: (span.start, -span.end))
        rows = _side_by_side(mine) if resource == "communication" else _by_thread(mine)
        for number, row in enumerate(rows or [[]], 1):
            found.append(Track(resource, resource if number == 1 else f"{resource} ({number})", row))
    return found


def _by_thread(spans: Sequence[Span]) -> list[list[Span]]:
    threads: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        threads[span.thread].append(span)
    return sorted(threads.values(), key=lambda row: -sum(span.end - span.start for span in row))


def _side_by_side(spans: Sequence[Span]) -> list[list[Span]]:
    rows: list[list[Span]] = []
    for span in spans:
        free = next((row for row in rows if row[-1].end <= span.start), None)
        if free is None:
            rows.append([span])
        else:
            free.append(span)
    return rows


def chrome_trace(window: Window, rank: int, ranks: int) -> dict[str, Any]:
    """A window in the Trace Event Format of Chrome, as JSON holds it.

    Args:
        window: the steps.
        rank: whose they are; the process of the trace.
        ranks: how many there are.

    Returns:
        "traceEvents": names of rows, and a complete event ("X") for every span and step, in microseconds from the first one
        on; "otherData": what they are, and the shares.
    """
    origin = min([window.starts[0], *(span.start for span in window.spans)])
    events: list[dict[str, Any]] = [_named("process_name", rank, 0, name=f"rank {rank} of {ranks}")]

    def row(number: int, name: str) -> None:
        events.append(_named("thread_name", rank, number, name=name))
        events.append(_named("thread_sort_index", rank, number, sort_index=number))

    def event(number: int, name: str, category: str, start: float, end: float, batch: int) -> None:
        colour = (
            {"cname": "grey" if category == "wait" else _CHROME_COLOURS[batch % len(_CHROME_COLOURS)]} if batch >= 0 else {}
        )
        times = {"ts": (start - origin) * 1e6, "dur": (end - start) * 1e6}
        place = {"pid": rank, "tid": number, "args": {"batch": batch}}
        events.append({"name": name, "cat": category, "ph": "X", **times, **place, **colour})

    row(0, "steps")
    for index, (start, end) in enumerate(pairwise(window.starts)):
        event(0, f"step of batch {window.first + index}", "step", start, end, window.first + index)
    for number, track in enumerate(tracks(window.spans), 1):
        row(number, track.name)
        for span in track.spans:
            event(number, span.name, span.resource, span.start, span.end, span.batch)
    about = {"rank": rank, "ranks": ranks, "epoch": window.epoch, "first batch": window.first, "steps": window.steps}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about | {"shares": window.shares._asdict()}}


def _named(what: str, rank: int, number: int, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": number, "args": args}


def _table(window: Window) -> Table:
    shares = window.shares
    step = shares.seconds / window.steps
    table = Table()
    for name in ("", "share of a step", "ms a step"):
        table.add_column(name, justify="right" if name else "left")
    divided = {"computing": shares.computing, "exposed communication": shares.exposed, "idle": shares.idle}
    for name, share in (divided | {"step": 1.0}).items():
        table.add_row(name, f"{share:.2%}", f"{share * step * 1e3:.2f}", end_section=name in ("idle", "step"))
    if sent := shares.communication:
        table.add_row("communication, hidden or not", f"{sent:.2%}", f"{sent * step * 1e3:.2f}")
        table.add_row("  of it hidden", f"{shares.hidden:.2%}", f"{(sent - shares.exposed) * step * 1e3:.2f}")
    waits: dict[str, float] = defaultdict(float)
    for span in window.touching():
        if span.resource == "wait":
            waits[span.name] += min(span.end, window.starts[-1]) - max(span.start, window.starts[0])
    for name, seconds in sorted(waits.items(), key=lambda pair: -pair[1]):
        if seconds >= 0.005 * shares.seconds:
            table.add_row(name, f"{seconds / shares.seconds:.2%}", f"{seconds / window.steps * 1e3:.2f}")
    return table
