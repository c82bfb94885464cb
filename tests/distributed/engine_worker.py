"""Worker of test_engine.py: `equal` compares trainings with one process, `rest` runs the other checks, `wrong` has a bad id."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import product
from unittest.mock import patch

import torch
from torch import distributed as dist

from tests.distributed.engine_cases import (
    DIM,
    OPTIMIZERS,
    SEVERAL,
    STEPS,
    TIMEOUT,
    Case,
    differences,
    digest,
    engine_of,
    fetched,
    relative,
    shares,
    table_of,
    topology,
    train,
    trained_alone,
)
from tests.distributed.launch import report_checks
from turbogr.errors import ConfigurationError, DataError
from turbogr.sparse.engine import SparseEngine
from turbogr.sparse.sharding import Sharding
from turbogr.sparse.table import EmbeddingTable
from turbogr.sparse.topology import HSPTopology, ProcessGroups


def cases(ranks: int) -> dict[str, Case]:
    """All row optimizers, one table and several, for each number of groups and both shardings; and what else matters."""
    found = {}
    for groups, kind in product([m for m in (1, 2, 4) if ranks % m == 0], ["row_wise", "table_wise"]):
        where = f"{groups}x{ranks // groups} {kind}"
        for place, optimizer in enumerate(OPTIMIZERS):
            found[f"{where} {optimizer}"] = Case(groups, kind, optimizer, several=place % 2 == 1)
        found[f"{where} accumulated"] = Case(groups, kind, "lazy_adam", several=True, accumulate=2)
        found[f"{where} clipped"] = Case(groups, kind, "adagrad", several=True, clip_norm=0.05)
    many = max(m for m in (2, 4) if ranks % m == 0)
    for form in ("gather", "two_phase"):
        found[f"{form} accumulated"] = Case(many, optimizer="adagrad", exchange=form, accumulate=3)
    found["PyTorch"] = Case(2, several=True, backend="torch")
    found["slower"] = Case(2, optimizer="lazy_adamw", lr_scale=0.25)
    return found


def faulty() -> dict[str, Case]:
    return {
        f"{fault} {optimizer}": Case(2, optimizer=optimizer, fault=fault)
        for fault, optimizer in product(["exchange", "group_size", "unweighted"], ["adagrad", "row_wise_adagrad", "lazy_adam"])
    }


def planned() -> dict[str, object]:
    case = Case(2, several=True)
    table, where = table_of(case), topology(2)
    engine = SparseEngine(table, where, Sharding.planned(table.spans, DIM, where.group_size))
    train(engine, case)
    found = engine.full_state()
    engine.close()
    return {"relative": {name: relative(found[name], x) for name, x in trained_alone(case).items()}}


def repeated() -> bool:
    """Two runs have the same bits."""
    digests = set()
    for _ in range(2):
        engine = engine_of(Case(2, optimizer="lazy_adam", several=True))
        train(engine, Case(2, optimizer="lazy_adam", several=True))
        digests.add(digest(engine.local_state()))
        engine.close()
    return len(digests) == 1


def one_start() -> dict[str, str]:
    """Ranks that drew different tables train those of group 0."""
    torch.manual_seed(dist.get_rank())
    table = EmbeddingTable()
    table.allocate(20, DIM)
    engine = SparseEngine(table, topology(2), Sharding.row_wise(table.spans, topology(2).group_size))
    engine.close()
    return {"member": str(engine.topology.member), "digest": digest(engine.local_state())}


def one_start_for_a_device() -> dict[str, object]:
    """The same where values go over a back end that sends from devices alone, as nccl and hccl do; tables are on the CPU."""
    where = topology(2)
    ranks = torch.arange(dist.get_world_size()).view(2, -1)
    devices_only = [dist.new_group(column.tolist(), timeout=TIMEOUT, backend="cuda:gloo") for column in ranks.T]
    groups = ProcessGroups(where.ids_pg, where.shard_pg, devices_only[where.member], where.meta_pg, where.host_pg)
    table = table_of(Case(2))
    with torch.no_grad():
        table.weight.add_(where.group)
    sharding = Sharding.row_wise(table.spans, where.group_size)
    engine = SparseEngine(table, HSPTopology(2, where.mesh, groups), sharding)
    engine.close()
    return {"member": where.member, "digest": digest(engine.local_state())}


def state_over_ranks() -> dict[str, bool]:
    """Sharded as promised; gathered by one or all; loaded into another topology it goes on as if nothing had happened."""
    case = Case(2, "row_wise", "lazy_adam", several=True)
    engine = engine_of(case)
    train(engine, case)
    rows, local = engine.sharding.sizes[engine.topology.member], engine.local_state()
    full = engine.full_state()
    with patch("turbogr.sparse.row_files.CHUNK_BYTES", 3 * 4 * DIM):
        one, again = engine.full_state(to_member=0), engine.full_state()
    second = engine_of(Case(1, "table_wise", "lazy_adam", several=True))
    second.load_full_state(full)
    reloaded = second.full_state()
    train(engine, case)
    train(second, case)
    expected, found = engine.full_state(), second.full_state()
    for each in (engine, second):
        each.close()
    return {
        "parts": all((len(x) == rows) if name != "optimizer.steps" else x.dim() == 0 for name, x in local.items()),
        "names": engine.sharded_keys == {"weight", "optimizer.exp_avg", "optimizer.exp_avg_sq"},
        "to one": set(one) == (set(full) if engine.topology.member == 0 else set())
        and all(torch.equal(x, full[name]) for name, x in one.items()),
        "in portions": all(torch.equal(x, full[name]) for name, x in again.items()),
        "reloaded": all(torch.equal(x, full[name]) for name, x in reloaded.items()),
        "goes on": all(relative(found[name], x) < 1e-5 for name, x in expected.items()),
        "as in one process": all(torch.equal(x, full[name]) for name, x in loaded_alone(full).items()),
    }


def loaded_alone(full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    table = table_of(Case(1, several=True))
    table.load_state_dict(full)
    return table.state_dict()


def other_states() -> list[str]:
    """Messages about states of other tables; nothing is changed by them."""
    engine = engine_of(Case(2, optimizer="adagrad"))
    state, before = engine.full_state(), digest(engine.local_state())
    messages = []
    for wrong in (
        {**state, "weight": state["weight"][:-1]},
        {**state, "weight": state["weight"][:, 1:]},
        {"weight": state["weight"]},
    ):
        try:
            engine.load_full_state(wrong)
        except DataError as error:
            messages.append(str(error))
    engine.close()
    assert digest(engine.local_state()) == before
    return messages


def evaluation() -> dict[str, bool]:
    """Ranks of a group fetch different rows, one of them none, and see them as they are now; nothing is trained by it."""
    result = {}
    for groups in (1, 2, dist.get_world_size()):
        case = Case(groups, several=True)
        engine = engine_of(case)
        share = shares(case, 1)[dist.get_rank()]
        before = digest(engine.local_state())
        with torch.no_grad():
            lookup = engine.table(share.features)
        full = engine.full_state()["weight"]
        result[f"{groups} groups"] = torch.equal(lookup.rows, full[lookup.ids]) and not lookup.rows.requires_grad
        engine.table.eval()
        result[f"{groups} groups, eval()"] = torch.equal(engine.table(share.features).rows, full[lookup.ids])
        assert digest(engine.local_state()) == before
        items = full[: SEVERAL["items"]]
        queries, targets = items[[3, 50, dist.get_rank()]], torch.tensor([3, 50, dist.get_rank()])
        ranks = engine.table.catalogue().target_ranks(queries, targets, None, None)
        result[f"{groups} groups, catalogue"] = ranks.unique().numel() == 1
        engine.close()
    return result


def refusals() -> list[str]:
    """What `take` says to look-ups that nothing was prepared for."""
    case = Case(2)
    engine = engine_of(case)
    share = shares(case, 0)[dist.get_rank()]
    messages = []

    def refused(features) -> None:
        try:
            engine.table(features)
        except ConfigurationError as error:
            messages.append(str(error))

    refused(share.features)
    batch = fetched(engine, share.features)
    refused({"values": share.features["values"]})
    refused({**share.features, "negatives": share.features["negatives"] + 1})
    refused({**share.features, "more": share.features["values"]})
    same = {name: ids.clone() for name, ids in share.features.items()}  # other tensors, the same ids
    assert engine.table(same) is engine.table(share.features)
    engine.backward(batch)
    refused(share.features)
    for call in (lambda: engine.backward(batch), lambda: SparseEngine(table_of(case), topology(2), engine.sharding, "other")):
        try:
            call()
        except (RuntimeError, ConfigurationError) as error:
            messages.append(str(error))
    engine.discard()
    engine.start_exchange(1.0)
    engine.update()  # there is nothing to update
    engine.settle()  # the discarded gradients are on their way, on some ranks
    engine.close()
    return messages


def discarded() -> dict[str, bool]:
    """Gradients thrown away at any point leave no trace, though their exchange was under way."""
    result = {}
    for groups, form in ((1, "auto"), (2, "gather"), (2, "two_phase"), (4, "two_phase")):
        case = Case(groups, several=True, exchange=form)
        engine = engine_of(case)
        share = shares(case, 5)[dist.get_rank()]
        for exchanged in (True, False):
            batch = fetched(engine, share.features)
            share.loss(engine.table(share.features)).backward()
            engine.backward(batch)
            if exchanged:
                engine.start_exchange(1.0)
            engine.discard()
        engine.update()
        train(engine, case)
        found = engine.full_state()
        engine.close()
        result[f"{groups} {form}"] = all(relative(found[name], x) < 1e-5 for name, x in trained_alone(case).items())
    return result


def counted(name: str, called: list[str], original: Callable) -> Callable:
    def call(*args, **options):
        called.append(name)
        return original(*args, **options)

    return call


def collectives() -> dict[str, list[str]]:
    """What one step calls, for every number of groups."""
    names = ["all_to_all_single", "all_gather_single", "all_gather_into_tensor", "broadcast", "all_reduce"]
    result: dict[str, list[str]] = {}
    originals = {name: getattr(dist, name) for name in names}
    for groups in (1, 2, dist.get_world_size()):
        for accumulate in (1, 3):
            case = Case(groups, several=True, exchange="gather", accumulate=accumulate)
            engine = engine_of(case)
            called: list[str] = []
            for name in names:
                setattr(dist, name, counted(name, called, originals[name]))
            train(engine, case)
            for name in names:
                setattr(dist, name, originals[name])
            engine.close()
            counts = {name: called.count(name) for name in set(called)}
            result[f"{groups} groups, {accumulate}"] = sorted(f"{name} {count / STEPS}" for name, count in counts.items())
    return result


def wrong_id() -> None:
    """Rank 1 has a batch with an id that does not exist."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    case = Case(2)
    engine = engine_of(case)
    share = shares(case, 2)[dist.get_rank()]
    if dist.get_rank() == 1:
        share.features["negatives"][0, 1] = 53
    fetched(engine, share.features)


if __name__ == "__main__":
    if sys.argv[1] == "wrong":
        wrong_id()
    elif sys.argv[1] == "equal":
        ranks = int(os.environ["WORLD_SIZE"])
        chosen = {**cases(ranks), **(faulty() if ranks == 4 else {})}
        report_checks({name: lambda case=case: differences(case) for name, case in chosen.items()})
    else:
        checks = [planned, repeated, one_start, one_start_for_a_device, state_over_ranks, other_states, evaluation]
        checks += [refusals, discarded, collectives]
        report_checks({check.__name__: check for check in checks})
