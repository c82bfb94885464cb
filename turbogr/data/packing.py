"""The algorithms behind `turbogr.data.balance.assign`: putting things of various cost on ranks, as evenly as possible.

Plans are lists of indices, one list a rank.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]

_ROUNDS, _FEWEST, _WORTH = 48, 12, 16_384  # rounds of exchanges, at most: of many ranks fewer, this many over their number
_PAIRS = 64  # of ranks that exchange in a round, at most
_SLOTS = 24  # histories of a rank that a round considers, at most
_ENOUGH = 5e-4  # of the mean load: exchanges end when the heaviest rank is no further above it


def longest_first(costs: Float64Array, ranks: int, tokens: Int64Array | None = None, cap: int = 0) -> list[list[int]] | None:
    """Each to the rank that has least (of those with room, None where there is none); histories are listed costliest first."""
    plan: list[list[int]] = [[] for _ in range(ranks)]
    taken = [0] * ranks
    heap = [(0.0, rank) for rank in range(ranks)]
    values = costs.tolist()
    for i in np.argsort(-costs, kind="stable").tolist():
        full = []
        if tokens is not None:
            while heap and taken[heap[0][1]] + int(tokens[i]) > cap:
                full.append(heapq.heappop(heap))
            if not heap:
                return None
            taken[heap[0][1]] += int(tokens[i])
        load, rank = heap[0]
        plan[rank].append(i)
        heapq.heapreplace(heap, (load + values[i], rank))
        for entry in full:
            heapq.heappush(heap, entry)
    return plan


def fullest_first(tokens: Int64Array, ranks: int, cap: int) -> list[list[int]] | None:
    """Longest first, each to the rank that it fills best: finds room where `longest_first` does not."""
    plan: list[list[int]] = [[] for _ in range(ranks)]
    rooms = [(cap, rank) for rank in range(ranks)]
    for i in np.argsort(-tokens, kind="stable").tolist():
        needed = int(tokens[i])
        at = bisect_left(rooms, (needed, -1))
        if at == ranks:
            return None
        room, rank = rooms.pop(at)
        plan[rank].append(i)
        insort(rooms, (room - needed, rank))
    return plan


def differences(costs: Float64Array, ranks: int) -> list[list[int]]:
    """Karmarkar and Karp's differencing for several sets (Korf 2009), over partial plans of non-empty sets only.

    A set is (load, first history, last history), the histories between being linked by `following`; a partial plan has its sets
    in the order of their loads, which count from that of the lightest rank.
    """
    order = np.argsort(-costs, kind="stable").tolist()
    values = costs.tolist()
    following = [-1] * len(values)
    plans = {n: [(values[i], i, i)] for n, i in enumerate(order)}
    heap = [(-values[i], n) for n, i in enumerate(order)]  # sorted, so a heap
    number = len(heap)
    while len(heap) > 1:
        one, other = (plans.pop(heapq.heappop(heap)[1]) for _ in range(2))
        if len(one) < len(other):
            one, other = other, one
        # The heaviest of `other` meet the lightest of `one`, of which the first `apart` are empty sets.
        apart = min(ranks - len(one), len(other))
        meeting = len(other) - apart
        for at, (load, first, last) in enumerate(reversed(other[:meeting])):
            following[one[at][2]] = first
            one[at] = (one[at][0] + load, one[at][1], last)
        if meeting:
            one.sort()
        for each in other[meeting:]:
            insort(one, each)
        if len(one) == ranks:
            lightest = one[0][0]
            one = [(load - lightest, first, last) for load, first, last in one]
        heapq.heappush(heap, (-one[-1][0], number))
        plans[number] = one
        number += 1
    found: list[list[int]] = []
    for _, first, _ in next(iter(plans.values()), []):
        found.append([first])
        while (after := following[found[-1][-1]]) >= 0:
            found[-1].append(after)
    return found + [[] for _ in range(ranks - len(found))]


def exchanged(costs: Float64Array, plan: list[list[int]], tokens: Int64Array, cap: int) -> Int64Array:
    """Exchanges between the heaviest ranks and lighter ones, many pairs at a time, as long as they help.

    Neither of a pair gets heavier than the heavier was, so nor does the heaviest of all; nor, with a cap, does any exceed it.

    Args:
        costs: float64 [B].
        plan: indices of each rank.
        tokens: int64 [B] where there is a cap, else empty.
        cap: most tokens of a rank.

    Returns:
        int64 [B], the rank of each history.
    """
    ranks, width = len(plan), max(map(len, plan)) + 1
    # Rows of slots; an empty one holds the history B, which costs nothing, so that a gift is a swap with an empty slot.
    nothing = len(costs)
    slots = np.full((ranks, width), nothing, dtype=np.int64)
    for rank, each in enumerate(plan):
        slots[rank, : len(each)] = each
    cost = np.append(costs, 0.0)
    loads = cost[slots].sum(1)
    capped = len(tokens) > 0
    length = np.append(tokens, 0) if capped else np.zeros(nothing + 1, dtype=np.int64)
    room = cap - length[slots].sum(1)
    mean = float(costs.sum()) / ranks
    pairs = min(ranks // 2, _PAIRS)
    window = min(width, _SLOTS)
    pair = np.arange(pairs)
    idle = 0
    for number in range(min(_ROUNDS, max(_FEWEST, _WORTH // ranks))):
        order = np.argsort(loads, kind="stable")
        if loads[order[-1]] - mean <= _ENOUGH * mean or idle == ranks - pairs:
            break
        heavy = order[::-1][:pairs]
        light = np.roll(order[: ranks - pairs], -number)[:pairs]
        columns = (np.arange(window) + number * window) % width
        given, returned = slots[heavy][:, columns], slots[light][:, columns]
        moved = cost[given][:, :, None] - cost[returned][:, None, :]
        apart = (loads[heavy] - loads[light])[:, None, None]
        gain = np.minimum(moved, apart - moved)
        if capped:
            more = length[given][:, :, None] - length[returned][:, None, :]
            gain[(more > room[light][:, None, None]) | (-more > room[heavy][:, None, None])] = 0
        gain = gain.reshape(pairs, -1)
        best = gain.argmax(1)
        helps = gain[pair, best] > 1e-9 * mean
        idle = 0 if helps.any() else idle + 1
        heavy, light, best = heavy[helps], light[helps], best[helps]
        a, b = columns[best // window], columns[best % window]
        out, back = slots[heavy, a], slots[light, b]
        slots[heavy, a], slots[light, b] = back, out
        loads[heavy] += cost[back] - cost[out]
        loads[light] += cost[out] - cost[back]
        room[heavy] += length[out] - length[back]
        room[light] += length[back] - length[out]
    owners = np.empty(nothing + 1, dtype=np.int64)
    owners[slots] = np.arange(ranks)[:, None]
    return owners[:nothing]
