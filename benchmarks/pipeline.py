"""Step time behind a slow link: what TorchRec ships, against TurboGRStrategy in both modes.

Five sides train the same HSTU with the same sampled softmax on the same batches from the same weights (`_sides.py`): serial
(each collective waited for where it is begun), TorchRec without a pipeline, TorchRec's TrainPipelineSparseDist, and ours, sync
and semi-asynchronous, under a Lightning Trainer. The link between the ranks is simulated by waiting (`_link.py`), or with
`--link real` a shaped one between network namespaces (`_namespaces.py`). Its bandwidth is set by measuring: communication shall
take 45 % of the serial step (TurboGR, section 4.2: 46.89 %).

Sides take turns in the same processes, so many steps each; the first steps of a turn fill the pipeline and are not counted. A
ratio is the median over the rounds. Computing, exposed communication and idle time are those of the paper's tables 5 and 6
(`turbogr.callbacks.intervals`). As a kernel may be slower on a CPU for reasons that have nothing to do with overlap, the same
rounds are run without the link, too, and the process time is given: what a side gains only behind the link is overlap.

Before the rounds, sides that promise the same must have the same weights: TorchRec's and ours in mode sync those of the serial
loop, ours in mode semi_async those of a loop that reads each batch's rows before the update of the batch before.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _batches import Lengths
from _link import BACKEND, Link, LinkGroup, Speed, open_link
from _namespaces import enter, shaped_network
from _ranks import run_on_ranks
from _report import Report, parse_arguments
from _results import write_section
from _sides import BUCKET_MB, Make, Ours, Serial, Shape, Side, clock_of, make_batches, make_model
from _timing import keep_freed_memory
from _torchrec import TorchRec
from _turns import PAGE, PLAIN, SEMI, SERIAL, SPARSE_DIST, SYNC, Turn, add_rows, median, of_all_ranks, section
from torch import Tensor

from turbogr.callbacks.intervals import step_shares

LATE = "serial, tau = 1"
SHARE = 0.45
"""Of communication in the serial step."""
BATCHES = 4
TOLERANCE = 1e-3
LEAD = 3
"""Steps of a turn that are not counted."""

USERS = 64
"""So many are 5,500 tokens a rank and step; the paper's batches have 15 histories of 2,048 (its Table 7)."""


def of_users(users: int) -> Shape:
    """Batches of so many histories, from a catalogue of which they look up the same share, whatever their number."""
    lengths = Lengths(4.4, 0.6, 16, num_items=450 * users)
    return Shape(lengths, users, max_length=200, negatives=8, dim=128, blocks=6, heads=2)


QUICK = replace(of_users(24), blocks=4)


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        shape: of model and batches.
        groups: M, of our sides and the serial one.
        sides: in the order in which they take turns.
        rounds: turns of each side behind the link.
        free_rounds: turns without the link.
        steps: of a turn that are counted.
        latency: of the link, seconds.
        shaped: bandwidth of a link that is real, bytes a second; None simulates one.
    """

    shape: Shape
    groups: int
    sides: tuple[str, ...]
    rounds: int
    free_rounds: int
    steps: int
    latency: float
    shaped: float | None = None


def makers(plan: Plan, link: Link) -> dict[str, Make]:
    """How each side is made; all ranks ask."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batches, items = make_batches(plan.shape, BATCHES, rank, ranks)
    tokens = numbers_of_all(*(batch.num_tokens for batch in batches))
    weights = [float(ranks * own / total) for own, total in zip(tokens[rank], tokens.sum(0), strict=True)]
    steps = 2 * BATCHES + (plan.rounds + plan.free_rounds + 8) * (LEAD + plan.steps)
    model = partial(make_model, plan.shape, items)
    return {
        SERIAL: lambda: Serial(model(), batches, weights, plan.groups),
        LATE: lambda: Serial(model(), batches, weights, plan.groups, late=True),
        PLAIN: lambda: TorchRec(model(), batches, weights, link, pipelined=False),
        SPARSE_DIST: lambda: TorchRec(model(), batches, weights, link, pipelined=True),
        SYNC: lambda: Ours(model(), batches, steps, groups=plan.groups, mode="sync"),
        SEMI: lambda: Ours(model(), batches, steps, groups=plan.groups, mode="semi_async"),
    }


def numbers_of_all(*numbers: float) -> Tensor:
    """float64 [W, numbers]."""
    own = torch.tensor(numbers, dtype=torch.float64)
    everywhere = own.new_empty(dist.get_world_size() * len(own))
    dist.all_gather_single(everywhere, own)
    return everywhere.view(-1, len(own))


def distances(plan: Plan, make: dict[str, Make]) -> dict[str, float]:
    """How far each side is from the hand-written loop that it must equal, after some steps, over the largest change.

    The sides' own order of steps is what they are compared by, so each is trained to its end.
    """
    items = make_batches(plan.shape, 1, 0, 1)[1]
    start = dict(make_model(plan.shape, items).named_parameters())
    reached = {}
    for name in dict.fromkeys((SERIAL, LATE, *plan.sides)):
        side = make[name]()
        side.run(2 * BATCHES)
        reached[name] = side.state()
        side.close()

    def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
        change = {key: (b[key] - start[_name(key)].detach()).abs().max() for key in b}
        return max(float((a[key] - b[key]).abs().max() / change[key]) for key in b if change[key] > 0)

    found = {name: apart(reached[name], reached[LATE if name == SEMI else SERIAL]) for name in plan.sides}
    return {**found, LATE: apart(reached[LATE], reached[SERIAL])}


def _name(key: str) -> str:
    return "embeddings.weight" if key == "rows" else key


def turn(side: Side, steps: int) -> Turn:
    """One turn of a side, begun by all ranks together."""
    dist.barrier()
    side.run(LEAD)
    side.watch(True)
    start, end, process = clock_of(side, steps)
    side.watch(False)
    shares = step_shares(side.spans(start, end), start, end)
    return Turn((end - start) / steps, process / steps, shares.computing, shares.exposed, shares.idle)


def calibrate(link: Link, side: Side, steps: int, latency: float) -> float:
    """Bandwidth, bytes a second, that makes communication SHARE of a serial step; equal on all ranks."""
    bandwidth = float("inf")
    for attempt in range(3):
        counted = 2 * steps if attempt else steps
        link.card.speed = Speed(bandwidth, latency)
        dist.barrier()
        side.run(LEAD)
        side.watch(True)
        link.record()
        start, end, _ = clock_of(side, counted)
        moved, _ = link.recorded()
        side.watch(False)
        shares = step_shares(side.spans(start, end), start, end)
        own = (shares.exposed * shares.seconds / counted, shares.seconds / counted, sum(one.nbytes for one in moved) / counted)
        exposed, seconds, nbytes = numbers_of_all(*own).mean(0).tolist()
        wanted = SHARE / (1 - SHARE) * (seconds - exposed)
        bandwidth = nbytes / max(nbytes / bandwidth + wanted - exposed, 1e-6)
    return bandwidth


def measure(plan: Plan) -> dict[str, Any]:
    """On every rank: the turns of each side behind the link and without it, distances of the weights, the link's speed."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    keep_freed_memory()
    world = dist.group.WORLD
    assert isinstance(world, LinkGroup)
    link = world.link
    make = makers(plan, link)
    apart = distances(plan, make)
    sides = {name: make[name]() for name in plan.sides}
    for side in sides.values():
        side.run(LEAD)
    speed = Speed(plan.shaped, plan.latency)
    if plan.shaped is None:
        speed = Speed(calibrate(link, sides[SERIAL], plan.steps, plan.latency), plan.latency)
    turns: dict[str, dict[str, list[Turn]]] = {}
    for where, rounds in (("link", plan.rounds), ("free", plan.free_rounds)):
        link.card.speed = speed if where == "link" and plan.shaped is None else Speed()
        turns[where] = {name: [] for name in sides}
        for number in range(rounds):
            order = list(sides) if number % 2 else list(sides)[::-1]
            for name in order:
                turns[where][name].append(turn(sides[name], plan.steps))
    link.card.speed = Speed()
    for side in sides.values():
        side.close()
    return {"turns": turns, "apart": apart, "speed": speed, **volume(plan)}


def serial_alone(plan: Plan) -> tuple[float, float]:
    """On every rank: the bandwidth that a simulated link should have, and communication's share on the link as it is."""
    world = dist.group.WORLD
    assert isinstance(world, LinkGroup)
    side = makers(plan, world.link)[SERIAL]()
    side.run(LEAD)
    share = turn(side, 2 * plan.steps).exposed
    bandwidth = calibrate(world.link, side, plan.steps, plan.latency) if plan.shaped is None else plan.shaped
    side.close()
    return bandwidth, share


def volume(plan: Plan) -> dict[str, float]:
    """What a step of this rank holds, on average."""
    batches, items = make_batches(plan.shape, BATCHES, dist.get_rank(), dist.get_world_size())
    model = make_model(plan.shape, items)
    distinct = [len(model.embeddings.request(model.sparse_features(batch)).ids) for batch in batches]
    return {
        "tokens": statistics.mean(batch.num_tokens for batch in batches),
        "distinct": statistics.mean(distinct),
        "dense": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "items": items,
    }


def over_link(spaces: str | None, rank: int) -> str:
    """Opens the link on a rank, in its namespace if there are any; it is given its speed later."""
    if spaces is not None:
        enter(f"{spaces}{rank}")
    open_link(Speed())
    return BACKEND


def run(plan: Plan, ranks: int, link: str) -> list[dict[str, Any]]:
    """What `measure` finds on every rank."""
    if link == "simulated":
        return run_on_ranks(measure, ranks, plan, timeout_s=1800.0, prepare=partial(over_link, None))
    bandwidth = min(bandwidth for bandwidth, _ in run_on_ranks(serial_alone, ranks, plan, prepare=partial(over_link, None)))
    spaces = f"turbogr{os.getpid()}-"
    prepare = partial(over_link, spaces)
    with shaped_network(spaces, ranks, bandwidth):
        found = run_on_ranks(serial_alone, ranks, replace(plan, shaped=bandwidth), prepare=prepare)
    # TCP does not reach what is asked of it in both directions at once.
    share = statistics.mean(share for _, share in found)
    bandwidth *= share / (1 - share) * (1 - SHARE) / SHARE
    with shaped_network(spaces, ranks, bandwidth):
        shaped = replace(plan, shaped=bandwidth, free_rounds=0)
        return run_on_ranks(measure, ranks, shaped, timeout_s=1800.0, prepare=prepare)


def check(apart: dict[str, float]) -> None:
    """Refuses to compare sides that do not train the same.

    Raises:
        SystemExit: some side's weights are not those of the loop that it must equal.
    """
    for name, distance in apart.items():
        if name != LATE and not distance <= TOLERANCE:
            raise SystemExit(f"{name}: the weights differ by {distance:.1e} of their largest change")
    if apart[LATE] <= TOLERANCE:
        raise SystemExit("a delay of one step changes nothing: the batches share no rows, and the comparison says little")


def notes(plan: Plan, ranks: list[dict[str, Any]], link: str) -> list[str]:
    """How it was measured."""
    found, speed = ranks[0], ranks[0]["speed"]
    megabits = 8e-6 * speed.bandwidth
    share = 100 * median(of_all_ranks(ranks, "link")[SERIAL], "exposed")
    delay = f"and {1e3 * speed.latency:g} ms each" if link == "simulated" else "by tbf"
    apart = ", ".join(f"{name} {distance:.1e}" for name, distance in found["apart"].items() if name != LATE)
    return [
        f"{link} link, {megabits:,.0f} Mbit/s {delay}: {share:.0f} % of the serial step ({100 * SHARE:.0f} wanted)",
        f"{plan.shape.data or 'synthetic'}: {plan.shape.users} histories, {found['tokens']:,.0f} tokens with "
        f"{plan.shape.negatives} negatives each, {found['distinct']:,.0f} distinct rows of {found['items']:,}, a rank and step",
        f"HSTU: {plan.shape.blocks} blocks, D {plan.shape.dim}; {found['dense']:,} dense parameters, buckets of {BUCKET_MB} MB",
        f"weights after {2 * BATCHES} steps, from those of the hand-written loop, over the largest change: {apart}",
        f"a delay of one step makes that difference {found['apart'][LATE]:.1e}",
        "TorchRec is handed each batch's distinct ids; ours finds them within the step",
        f"{len(ranks)} gloo ranks of one thread, {plan.rounds} rounds of {plan.steps} steps, torch {torch.__version__}",
    ]


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="(default: 2)")
    parser.add_argument("--groups", type=int, default=1, help="copies of the table, of our sides (default: 1, as TorchRec has)")
    parser.add_argument("--link", choices=("simulated", "real"), default="simulated", help="(default: simulated)")
    parser.add_argument("--latency-ms", type=float, default=0.2, help="of the simulated link (default: 0.2)")
    parser.add_argument("--users", type=int, default=USERS, help=f"histories of a rank's batch (default: {USERS})")
    parser.add_argument("--data", type=Path, metavar="DIR", help="prepared folder (default: synthetic histories)")
    parser.add_argument("--page", action="store_true", help="write the table into docs/semi-async.md")
    arguments = parse_arguments(parser)
    quick = arguments.quick
    plan = Plan(
        shape=replace(QUICK if quick else of_users(arguments.users), data=arguments.data),
        groups=arguments.groups,
        sides=(SERIAL, SPARSE_DIST, SYNC, SEMI) if quick else (SERIAL, PLAIN, SPARSE_DIST, SYNC, SEMI),
        rounds=3 if quick else 12,
        free_rounds=1 if quick else 4,
        steps=5 if quick else 8,
        latency=1e-3 * arguments.latency_ms if arguments.link == "simulated" else 0.0,
    )
    ranks = run(plan, arguments.ranks, arguments.link)
    check(ranks[0]["apart"])
    report = Report("pipeline", quick)
    add_rows(report, ranks)
    said = notes(plan, ranks, arguments.link)
    for note in said:
        report.note(note)
    if arguments.page and not quick:
        write_section(PAGE, "pipeline", section(ranks, said))
    return report.finish(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
