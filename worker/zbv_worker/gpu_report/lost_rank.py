"""The check of failure: one rank of a run is killed, and the others must end with an error that names it."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from zbv_solver.plans.plan import identity
from zbv_solver.problem.stages import Placement
from zbv_solver.problem.writing import problem_json

from zbv_worker.gpu_report.check import Line, ReportOptions, at_most, failed, that
from zbv_worker.gpu_report.rank import v_orders
from zbv_worker.host.local_ranks import LocalRanks, python_command, tail
from zbv_worker.measure.ranks import equal_stages
from zbv_worker.transport.world import Backend

LEAVING_SECONDS = 30.0
"""How long the other ranks may take to end after the timeout: NCCL's groups must be aborted first."""

_TIMEOUT = 10.0
_START_SECONDS = 120.0
_POLL_SECONDS = 0.05
_VICTIM = 1
_MODEL = {"width": 32, "heads": 2, "length": 32, "sequences": 2, "characters": 20_000}
"""A small model, because over gloo the run computes on CPUs; how a run ends does not depend on its model."""


def lose_a_rank(options: ReportOptions, backend: Backend) -> Iterator[Line]:
    """Train with ``zbv-worker run``, kill rank 1 within a step, and watch the others end."""
    what = "the other ranks end after a rank was killed"
    with tempfile.TemporaryDirectory(prefix="zbv-gpu-report-") as name:
        folder = Path(name)
        command = python_command("zbv_worker.commands.cli", *_run(options, backend, folder))
        with LocalRanks([command] * options.ranks, folder) as started:
            if not _until(_START_SECONDS, lambda: _is_training(started)):
                last = "; ".join(tail(started.log(0))[-2:])
                yield failed(what, f"no step was trained within {_START_SECONDS:g} s: {last}")
                return
            others = [rank for rank in range(options.ranks) if rank != _VICTIM]
            os.kill(started.processes[_VICTIM].pid, signal.SIGKILL)
            killed = time.monotonic()
            _until(_TIMEOUT + LEAVING_SECONDS, partial(_have_ended, started, others))
            seconds = time.monotonic() - killed
            running = [rank for rank in others if started.processes[rank].poll() is None]
            if running:
                yield failed(what, f"after {seconds:.0f} s, ranks {running} still run")
            else:
                yield at_most(what, seconds, _TIMEOUT + LEAVING_SECONDS, "s")
            for rank in others:
                said = next((line for line in started.log(rank).splitlines() if "zbv-worker:" in line), "")
                names_it = f"rank {_VICTIM} lost" in said
                yield that(
                    f"rank {rank} names the lost rank", names_it, f"it said: {said or 'nothing'}", said
                )


def _run(options: ReportOptions, backend: Backend, folder: Path) -> list[str]:
    """The arguments of ``zbv-worker run``; writes the plan."""
    problem = equal_stages(Placement.of("v", options.ranks), options.microbatches)
    document = {"problem": problem_json(problem), "ranks": v_orders(problem).all_text()}
    plan = folder / "plan.json"
    plan.write_text(json.dumps({**document, "plan_id": identity(*document.values())}))  # type: ignore[arg-type]
    sizes = json.dumps({**_MODEL, "layers": problem.n_stages})
    model = ["--model", "zbv_worker.models.gpt:gpt", "--model-args", sizes]
    numbers = ["--steps", "1000000", "--timeout", f"{_TIMEOUT:g}", "--threads", "1"]
    return ["run", "--plan-file", str(plan), *model, "--backend", backend, *numbers]


def _is_training(started: LocalRanks) -> bool:
    ended = any(process.poll() is not None for process in started.processes)
    return ended or any("step 2:" in started.log(rank) for rank in range(len(started.processes)))


def _have_ended(started: LocalRanks, ranks: list[int]) -> bool:
    return all(started.processes[rank].poll() is not None for rank in ranks)


def _until(seconds: float, holds: Callable[[], bool]) -> bool:
    """Poll until a statement holds; returns whether it does."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
