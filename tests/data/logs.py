"""Raw logs for tests, and a plain-Python preparation to compare with."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from turbogr.data.prepared import PreparedData

KUAIRAND_COLUMNS = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,play_time_ms,"
    "duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab"
)
START_MS = 1_649_349_856_990


@dataclass(frozen=True)
class Event:
    """One line of a KuaiRand log."""

    user: int
    item: int
    time: int
    click: int = 1
    like: int = 0
    hate: int = 0
    long_view: int = 0

    @property
    def line(self) -> str:
        signals = f"{self.click},{self.like},0,0,0,{self.hate},{self.long_view}"
        return f"{self.user},{self.item},20220408,900,{self.time},{signals},100,200,0,0,0,0,1"


def write_kuairand(file: Path, events: Iterable[Event]) -> Path:
    file.write_text("\n".join([KUAIRAND_COLUMNS, *(event.line for event in events)]) + "\n", encoding="ascii")
    return file


def write_triples(file: Path, triples: Iterable[tuple[int, int, int]]) -> Path:
    """(user, item, time) as MovieLens's u.data."""
    file.write_text("".join(f"{user}\t{item}\t3\t{time}\n" for user, item, time in triples), encoding="ascii")
    return file


def some_triples(seed: int = 0, users: int = 20, events: int = 400) -> list[tuple[int, int, int]]:
    rng = random.Random(seed)
    return [(rng.randrange(users), rng.randrange(30), 900_000_000 + rng.randrange(15)) for _ in range(events)]


def naive_histories(
    events: Sequence[tuple[Any, ...]],
    repeats: str = "keep",
    k: int = 0,
    passes: int | None = None,
    max_length: int | None = None,
) -> dict[Any, list[tuple[Any, ...]]]:
    """Histories [(item, time, features…)] by user of events (user, item, time, features…) in reading order.

    Every rule of `prepare`, in the slowest and plainest way.
    """
    ordered = sorted(events, key=lambda event: (event[0], event[2]))  # Python's sort is stable
    if repeats != "keep":
        seen, kept = set(), []
        for event in ordered if repeats == "first" else reversed(ordered):
            if event[:2] not in seen:
                seen.add(event[:2])
                kept.append(event)
        ordered = kept if repeats == "first" else kept[::-1]
    rounds = 0
    while k and (passes is None or rounds < passes):
        users, items = Counter(event[0] for event in ordered), Counter(event[1] for event in ordered)
        left = [event for event in ordered if users[event[0]] >= k and items[event[1]] >= k]
        if len(left) == len(ordered):
            break
        ordered, rounds = left, rounds + 1
    histories: dict[Any, list[tuple[Any, ...]]] = {}
    for user, *rest in ordered:
        histories.setdefault(user, []).append(tuple(rest))
    if max_length is not None:
        histories = {user: history[-max_length:] for user, history in histories.items()}
    return {user: history for user, history in histories.items() if len(history) >= 3}


def stored_histories(folder: Path) -> dict[Any, list[tuple[Any, ...]]]:
    """The same from a prepared folder, in original ids and values."""
    data = PreparedData.open(folder)
    users = data.user_ids(np.arange(data.num_users)).to_pylist()
    columns = [data.item_ids(data.items).to_pylist(), data.times.tolist()]
    for name, rows in data.event_features.items():
        values = data.feature_values(name).to_pylist()
        columns.append([values[row] for row in rows])
    bounds = data.offsets.tolist()
    events = list(zip(*columns, strict=True))
    return {user: events[start:end] for user, start, end in zip(users, bounds, bounds[1:], strict=False)}


def stored_item_values(folder: Path, name: str) -> dict[Any, Any]:
    """The value of a feature of items, by original item id."""
    data = PreparedData.open(folder)
    (rows,) = (table.item_rows for table in data.features if table.name == name)
    assert rows is not None
    values = data.feature_values(name).to_pylist()
    return {item: values[row] for item, row in zip(data.item_ids(np.arange(data.num_items)).to_pylist(), rows, strict=True)}
