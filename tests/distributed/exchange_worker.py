"""Worker of test_exchange.py: four ranks, of which the first M are M groups of one member each."""

import hashlib
from datetime import timedelta

import torch
from torch import distributed as dist

from tests.distributed.launch import report_checks
from turbogr.sparse.exchange import RowUnion, ValueExchange, union_of_rows

RANKS, DIM = 4, 8
FORMS = ("gather", "two_phase")
CASES = ["overlapping", "disjoint", "equal", "unequal", "first_empty", "one_alone", "all_empty", "one_row", "wide_ids"]


def contribution(case: str, group: int, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A group's row ids and gradient: of every group, on every rank, so that each knows the truth."""
    g = torch.Generator().manual_seed(1000 * group + CASES.index(case))
    ids = torch.randperm(200, generator=g)[:80].sort().values
    if case == "disjoint":
        ids = torch.arange(50) * groups + group
    elif case == "equal":
        ids = torch.arange(70)
    elif case == "unequal":
        ids = torch.randperm(500, generator=g)[: 10 + 130 * group].sort().values
    elif case == "all_empty" or (case == "first_empty" and group == 0) or (case == "one_alone" and group != groups - 1):
        ids = ids[:0]
    elif case == "one_row":
        ids = torch.tensor([17])
    elif case == "wide_ids":
        ids = ids + 2**33
    # Different sizes: the order of additions shows in the bits.
    return ids, torch.randn(len(ids), DIM, generator=g) * 10.0 ** (group * 2 - 3)


def truth(case: str, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [contribution(case, group, groups) for group in range(groups)]
    ids = torch.unique(torch.cat([rows for rows, _ in parts]))
    sums = torch.zeros(len(ids), DIM, dtype=torch.float64)
    for rows, gradient in parts:
        sums.index_add_(0, torch.searchsorted(ids, rows), gradient.double())
    return ids, sums


def largest_error(sums: torch.Tensor, expected: torch.Tensor) -> float:
    return 0.0 if not len(expected) else float((sums.double() - expected).abs().max() / expected.abs().max())


class Counter:
    """Bytes that this rank sends to others, by collective, while it is entered."""

    def __enter__(self) -> "Counter":
        self.sent: dict[str, int] = {}
        self.saved = dist.all_gather_single, dist.all_to_all_single

        def gather(output, given, group=None, async_op=False):
            self.add("gather", given.nbytes * (group.size() - 1))
            return self.saved[0](output, given, group=group, async_op=async_op)

        def exchange(output, given, output_splits, input_splits, group=None, async_op=False):
            width = given.element_size() * given.shape[1]
            self.add("exchange", width * sum(n for k, n in enumerate(input_splits) if k != group.rank()))
            return self.saved[1](output, given, output_splits, input_splits, group=group, async_op=async_op)

        dist.all_gather_single, dist.all_to_all_single = gather, exchange
        return self

    def add(self, name: str, count: int) -> None:
        self.sent[name] = self.sent.get(name, 0) + count

    def __exit__(self, *exception: object) -> None:
        dist.all_gather_single, dist.all_to_all_single = self.saved


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def groups_of(count: int, timeout_s: float = 30.0) -> tuple[dist.ProcessGroup, dist.ProcessGroup] | None:
    """Value and id groups of the first `count` ranks; None on the others."""
    made = [dist.new_group(list(range(count)), timeout=timedelta(seconds=timeout_s), backend="gloo") for _ in range(2)]
    return (made[0], made[1]) if dist.get_rank() < count else None


def sums(groups: int) -> dict | None:
    made = groups_of(groups)
    if made is None:
        return None
    replica, meta = made
    found = {}
    for case in CASES:
        ids, gradient = contribution(case, dist.get_rank(), groups)
        before = gradient.clone()
        with Counter() as ids_counter:
            union = union_of_rows(ids, meta)
        expected_ids, expected = truth(case, groups)
        own = union.positions[dist.get_rank()]
        entry = {
            "ids": torch.equal(union.ids, expected_ids) and union.ids.dtype == torch.int64,
            "own": torch.equal(union.ids[own], ids),
            "sizes": union.sizes,
            "rows": len(union.ids),
            "id_bytes": ids_counter.sent.get("gather", 0),
        }
        exchanges = {form: ValueExchange(replica, form) for form in (*FORMS, "auto")}
        for form, exchange in exchanges.items():
            repeats = []
            with Counter() as counter:
                for _ in range(2):
                    repeats.append(exchange.prepare(union, gradient)(gradient))
            entry[form] = {
                "bits": [digest(x) for x in repeats],
                "error": largest_error(repeats[0], expected),
                "shape": list(repeats[0].shape),
                "sent": sum(counter.sent.values()) // 2,
                "how": sorted(counter.sent),
            }
        entry["unchanged"] = torch.equal(gradient, before)
        found[case] = entry
    return found


def dropped_group() -> dict | None:
    """An exchange that loses the last group's values: the checks of `sums` must notice."""
    made = groups_of(3)
    if made is None:
        return None
    replica, meta = made
    ids, gradient = contribution("overlapping", dist.get_rank(), 3)
    union = union_of_rows(ids, meta)
    expected = truth("overlapping", 3)[1]
    found = {}
    for form in FORMS:
        exchange = ValueExchange(replica, form).prepare(union, gradient)
        result = exchange(gradient * (dist.get_rank() != 2))
        found[form] = {"bits": digest(result), "error": largest_error(result, expected)}
    return found


def lost_peer() -> str | None:
    """Rank 1 never comes; rank 0 must learn of it."""
    made = groups_of(2, timeout_s=1.0)
    if made is None or dist.get_rank() == 1:
        return None
    union = RowUnion(torch.arange(3), [torch.arange(3), torch.arange(3)])
    exchange = ValueExchange(made[0], "two_phase").prepare(union, torch.ones(3, DIM))
    try:
        exchange(torch.ones(3, DIM))
    except RuntimeError as error:
        return type(error).__name__
    return "no error"


def misuse() -> list[str] | None:
    """A gradient of other rows than the union's, a union of other groups."""
    made = groups_of(2)
    if made is None:
        return None
    exchange, messages = ValueExchange(made[0], "auto"), []
    union = RowUnion(torch.arange(2), [torch.arange(2), torch.arange(2)])
    alone = RowUnion(torch.arange(2), [torch.arange(2)])
    for given in (union, alone):
        try:
            exchange.prepare(given, torch.ones(1, DIM))(torch.ones(3, DIM))
        except ValueError as error:
            messages.append(str(error))
    return messages


if __name__ == "__main__":
    torch.set_num_threads(1)
    checks = {f"sums{groups}": (lambda groups=groups: sums(groups)) for groups in (1, 2, 3, 4)}
    # The lost peer comes last: it leaves a broken group behind.
    report_checks({**checks, "dropped": dropped_group, "misuse": misuse, "lost": lost_peer})
