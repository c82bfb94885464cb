"""Write a small, valid, random prepared folder, for tests that need one and no raw logs."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from turbogr.data.manifest import ContentHash, length_percentiles, write_manifest


def write_prepared(
    folder: Path,
    num_users: int,
    num_items: int,
    min_len: int = 3,
    max_len: int = 20,
    seed: int = 0,
    time_unit: str = "s",
    protocol: str = "three_way",
    string_ids: bool = False,
    features: Mapping[str, tuple[str, int]] | None = None,
) -> Path:
    """Write a folder of random events; every item occurs where there are events enough, and some times are tied.

    Original ids are ``10 + 3 row`` of users and ``100 + 7 row`` of items (or the text ``u…`` / ``i…``, zero-padded), so that
    a row taken for an id is noticed. ``features`` is {name: (side, rows)}; the value of a feature's row r is 1000 + r.
    """
    assert 3 <= min_len <= max_len
    random = np.random.default_rng(seed)
    lengths = random.integers(min_len, max_len + 1, num_users)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    events = int(offsets[-1])
    items = random.integers(0, num_items, events)
    if events >= num_items:
        items[random.permutation(events)[:num_items]] = random.permutation(num_items)
    items = items.astype(np.int32)
    users = np.repeat(np.arange(num_users), lengths).astype(np.int32)
    positions = np.arange(events) - offsets[users]
    if time_unit == "none":
        times = positions
    else:
        # Gaps from a second (or less) to days, a third of them zero.
        gaps = np.floor(np.exp(random.uniform(0, 12, events))) * (random.random(events) > 1 / 3)
        times = 1_600_000_000 + np.cumsum(gaps.astype(np.int64))
        times = times - times[offsets[users]] + 1_600_000_000
        times = times * (1000 if time_unit == "ms" else 1)
    times = times.astype(np.int64)

    folder.mkdir(parents=True, exist_ok=True)
    for name, array in (("items", items), ("times", times), ("offsets", offsets)):
        np.save(folder / f"{name}.npy", array)
    pq.write_table(pa.table({"user": users, "item": items, "time": times}), folder / "events.parquet")
    user_ids, item_ids = 10 + 3 * np.arange(num_users), 100 + 7 * np.arange(num_items)
    tables = {}
    for name, ids, letter, counts in (
        ("users", user_ids, "u", lengths),
        ("catalogue", item_ids, "i", np.bincount(items, minlength=num_items)),
    ):
        column = pa.array([f"{letter}{value:09d}" for value in ids]) if string_ids else pa.array(ids, pa.int64())
        rows = np.arange(len(ids), dtype=np.int64)
        tables[name] = pa.table({"row": rows, "id": column, "events": counts.astype(np.int64)})
        pq.write_table(tables[name], folder / f"{name}.parquet")
    content = ContentHash()
    content.add_settings({"protocol": protocol, "time_unit": time_unit})
    for name, array in (("items", items), ("times", times), ("offsets", offsets)):
        content.add_array(name, array)
    content.add_ids("users", tables["users"]["id"])
    content.add_ids("catalogue", tables["catalogue"]["id"])
    entries = []
    for name, (side, count) in (features or {}).items():
        (folder / "features").mkdir(exist_ok=True)
        array = random.integers(0, count, events if side == "event" else num_items).astype(np.int32)
        values = pa.array([None, *range(1001, 1000 + count)], pa.int64())
        np.save(folder / "features" / f"{name}.npy", array)
        table = pa.table({"row": np.arange(count), "value": values, "count": np.bincount(array, minlength=count)})
        pq.write_table(table, folder / "features" / f"{name}.parquet")
        content.add_feature(name, side, array, values)
        entries.append(
            {"name": name, "side": side, "rows": count, "file": f"features/{name}.npy", "map": f"features/{name}.parquet"}
        )
    write_manifest(
        folder,
        {
            "turbogr": "test",
            "source": "events",
            "files": [],
            "options": {},
            "protocol": protocol,
            "time_unit": time_unit,
            "counts": [{"step": "read", "events": events, "users": num_users, "items": num_items}],
            "too_short": 0,
            "num_users": num_users,
            "num_items": num_items,
            "num_events": events,
            "length_percentiles": length_percentiles(lengths),
            "maps": {"users": "users.parquet", "items": "catalogue.parquet"},
            "content_hash": content.hexdigest(),
            "features": entries,
        },
    )
    return folder
