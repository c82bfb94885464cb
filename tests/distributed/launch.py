"""Runs programs on several ranks, and lets them report results that tests then judge.

`launch` runs anything under torchrun. Where many checks share one set of ranks, a worker module calls `report_checks` and a
session-scoped fixture calls `launch_checks` once:

    # tests/distributed/engine_worker.py, run on every rank
    if __name__ == "__main__":
        report_checks({"row_wise": row_wise, "table_wise": table_wise})  # each returns something that JSON can hold

    # tests/distributed/test_engine.py
    @pytest.fixture(scope="session")
    def engine(tmp_path_factory):
        return launch_checks("tests.distributed.engine_worker", 4, tmp_path_factory.mktemp("engine"))

    def test_row_wise(engine):
        for rank, difference in enumerate(engine["row_wise"]): ...

Assert in the test, not in the worker, wherever that is possible: a rank that raises leaves the others waiting for it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
REPORTS = "TURBOGR_TEST_REPORTS"


@dataclass(frozen=True)
class Finished:
    """A launch that has ended.

    Attributes:
        code: 0 if every rank of every node exited with 0; -1 after a timeout.
        seconds: how long it took.
        outputs: what each rank printed, by rank.
        agents: what torchrun itself printed, by node.
    """

    code: int
    seconds: float
    outputs: list[str]
    agents: list[str]

    def everything(self) -> str:
        """All outputs, to be read by a person."""
        parts = [f"exit code {self.code} after {self.seconds:.1f} s"]
        parts += [f"---- rank {rank} ----\n{text.rstrip()}" for rank, text in enumerate(self.outputs)]
        parts += [f"---- torchrun of node {node} ----\n{text.rstrip()}" for node, text in enumerate(self.agents)]
        return "\n".join(parts)


def launch(
    program: Sequence[str | Path],
    ranks: int,
    folder: Path,
    *,
    nodes: int = 1,
    timeout: float = 120.0,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    expect: int | None = 0,
) -> Finished:
    """Runs `program` on `ranks` ranks under torchrun, one thread each, and waits for its end.

    Args:
        program: `["-m", module, *arguments]`, `["path/to/script.py", *arguments]`.
        ranks: of all nodes together.
        folder: where the outputs go; must be the launch's own.
        nodes: torchrun agents, as if each ran on a machine of its own; LOCAL_RANK, GROUP_RANK and so on are set accordingly.
        timeout: seconds, after which the whole tree of processes is killed.
        environment: added to this process's; the checkout is on PYTHONPATH.
        cwd: where the program runs; the checkout by default.
        expect: the exit code, 1 standing for any failure; None takes what comes, but never a timeout.

    Raises:
        AssertionError: if the code is another, or at a timeout; with what every rank printed.
    """
    assert ranks % nodes == 0, f"{ranks} ranks on {nodes} nodes"
    path = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1", **(environment or {})}
    # A rank of this launch must not take itself for one of an outer launch, nor reuse its seed.
    inherited = {k: v for k, v in os.environ.items() if k not in ("PL_GLOBAL_SEED", "RANK", "LOCAL_RANK", "WORLD_SIZE")}
    if nodes == 1:
        meeting = [["--standalone"]]
    else:
        where = ["--nnodes", str(nodes), "--master-addr", "127.0.0.1", "--master-port", str(_free_port())]
        meeting = [[*where, "--node-rank", str(node)] for node in range(nodes)]
    agents, started = [], monotonic()
    for node, arguments in enumerate(meeting):
        logs = folder / f"node{node}"
        logs.mkdir(parents=True)
        command = [sys.executable, "-m", "torch.distributed.run", *arguments, "--nproc-per-node", str(ranks // nodes)]
        command += ["--local-addr", "127.0.0.1", "--redirects", "3", "--log-dir", str(logs), *map(str, program)]
        with (folder / f"agent{node}.log").open("w") as log:
            agents.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**inherited, **settings},
                    cwd=cwd or CHECKOUT,
                    start_new_session=True,  # a process group of its own, to be killed as one
                )
            )
    try:
        codes = [agent.wait(max(0.0, started + timeout - monotonic())) for agent in agents]
        code = max(abs(c) for c in codes)
    except subprocess.TimeoutExpired:
        code = -1
    finally:
        for agent in agents:
            _kill(agent)
    outputs = [_rank_output(folder, rank, ranks // nodes) for rank in range(ranks)]
    said = [(folder / f"agent{node}.log").read_text(errors="replace") for node in range(nodes)]
    finished = Finished(code, monotonic() - started, outputs, said)
    assert code != -1, f"not finished after {timeout} s, killed\n{finished.everything()}"
    assert expect is None or code == expect, f"expected exit code {expect}\n{finished.everything()}"
    return finished


class Checks:
    """What the ranks of a launch reported: `checks[name]` is the list of their results, by rank."""

    def __init__(self, finished: Finished, reports: list[dict[str, dict[str, Any]]]) -> None:
        self.finished, self.reports = finished, reports

    def __getitem__(self, name: str) -> list[Any]:
        """Results of a check, by rank.

        Raises:
            AssertionError: if the check failed on a rank or was not reached; with that rank's traceback, or all outputs.
        """
        found = [report.get(name, {}) for report in self.reports]
        errors = [f"---- rank {rank} ----\n{r['error']}" for rank, r in enumerate(found) if "error" in r]
        assert not errors, f"check {name!r} failed\n" + "\n".join(errors)
        assert all("result" in r for r in found), f"check {name!r} was not reached\n{self.finished.everything()}"
        return [r["result"] for r in found]


def launch_checks(module: str, ranks: int, folder: Path, *arguments: str, timeout: float = 120.0, **options: Any) -> Checks:
    """Runs a worker module that calls `report_checks`; a failing worker fails those tests that ask for the missing results.

    Args:
        module: dotted name.
        ranks: how many.
        folder: as in `launch`.
        arguments: for the worker.
        timeout: as in `launch`.
        options: the others of `launch`.
    """
    reports = folder / "reports"
    reports.mkdir(parents=True)
    environment = {**options.pop("environment", {}), REPORTS: str(reports)}
    program = ["-m", module, *arguments]
    finished = launch(program, ranks, folder, timeout=timeout, environment=environment, expect=None, **options)
    results: list[dict[str, dict[str, Any]]] = []
    for rank in range(ranks):
        path = reports / f"{rank}.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        results.append({entry["name"]: entry for entry in map(json.loads, lines)})
    return Checks(finished, results)


def report_checks(checks: Mapping[str, Callable[[], Any]], timeout_s: float = 30.0, backend: str = "gloo") -> None:
    """For a worker: opens the process group, runs the checks in their order on every rank and reports what each returns.

    Args:
        checks: name -> function, whose result JSON can hold.
        timeout_s: of the process group, so that a missing rank is an error and no hang.
        backend: of the process group; an empty string opens none.
    """
    from torch import distributed as dist

    if backend:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    path = Path(os.environ[REPORTS]) / f"{os.environ['RANK']}.jsonl"
    with path.open("a") as file:
        for name, check in checks.items():
            try:
                entry = {"name": name, "result": check()}
            except BaseException:
                print(json.dumps({"name": name, "error": traceback.format_exc()}), file=file, flush=True)
                raise
            print(json.dumps(entry), file=file, flush=True)
    if backend and dist.is_initialized():  # a last check may have ended it, as the end of a process does
        dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _kill(agent: subprocess.Popen[bytes]) -> None:
    """Ends the agent and its ranks; those lie in sessions of their own, and torchrun ends them when it is asked to."""
    ranks = _descendants(agent.pid)
    if agent.poll() is None:
        agent.terminate()
        try:
            agent.wait(5.0)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()
    for pid in ranks:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _descendants(pid: int) -> list[int]:
    """All processes below `pid`."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found, pending = [], [pid]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def _parents() -> list[tuple[int, int]]:
    """Every process and its parent, from /proc, or from `ps` where there is none."""
    if not Path("/proc/self/stat").is_file():
        listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        return [(int(child), int(parent)) for child, parent in map(str.split, listed.splitlines())]
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):  # it ended in between
            continue
        found.append((int(stat.parent.name), int(text.rpartition(")")[2].split()[1])))
    return found


def _rank_output(folder: Path, rank: int, per_node: int) -> str:
    """Stdout and stderr of a rank, wherever below its node's folder torchrun put them."""
    node, local = divmod(rank, per_node)
    parts = []
    for name in ("stdout.log", "stderr.log"):
        for path in sorted((folder / f"node{node}").glob(f"**/{local}/{name}")):
            parts.append(path.read_text(errors="replace"))
    return "".join(parts)
