from __future__ import annotations

import csv
import math

import torch

from turbogr.models.bias import TimeBuckets


def test_buckets_are_the_formula():
    gaps = torch.tensor([0, 1, 2, 3, 60, -60, 3600, 10**9])
    expected = [min(32, math.floor(math.log(max(abs(int(g)), 1)) / 0.301)) for g in gaps]
    assert TimeBuckets(32).buckets(gaps).tolist() == expected
    assert TimeBuckets(32, unit=1000.0).buckets(gaps * 1000).tolist() == expected


def gaps_of(rows, user, time, newest=200):
    """t[i + 1] - t[j] for all j <= i of each user's newest events."""
    times: dict[str, list[int]] = {}
    for row in rows:
        times.setdefault(row[user], []).append(int(row[time]))
    for values in list(times.values())[:100]:
        t = torch.tensor(sorted(values)[-newest:])
        gap = t[1:, None] - t[None, :-1]
        yield gap[torch.ones_like(gap, dtype=torch.bool).tril()]


def shares(buckets, gaps):
    counts = torch.bincount(buckets.buckets(torch.cat(list(gaps))), minlength=buckets.count + 1)
    return counts / counts.sum()


def test_real_movielens_gaps_use_many_buckets(shared_data):
    with open(shared_data / "ml-latest-small" / "ratings.csv", newline="") as file:
        gaps = list(gaps_of(csv.DictReader(file), "userId", "timestamp"))
    share = shares(TimeBuckets(128, 0.301), gaps)
    assert (share > 0.01).sum() >= 10
    assert share.max() < 0.5


def test_real_kuairand_gaps_use_many_buckets_in_seconds_and_saturate_in_milliseconds(shared_data):
    (path,) = (shared_data / "kuairand-27k-sample").glob("log_standard*.csv")
    with open(path, newline="") as file:
        gaps = list(gaps_of(csv.DictReader(file), "user_id", "time_ms"))
    assert (shares(TimeBuckets(32, 0.5, unit=1000.0), gaps) > 0.01).sum() >= 8
    # The negative control: milliseconds taken for seconds pile up in the last of the paper's 32 buckets.
    assert shares(TimeBuckets(32, 0.301, unit=1.0), gaps)[-1] > 0.9
