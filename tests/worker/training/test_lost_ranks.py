"""Four real ranks over gloo of which one is lost: the others name it and end, each by itself, and in time.

With ``--log-cli-level info``, pytest shows how long that took.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import time
from pathlib import Path
from random import Random

import pytest
from support.selfcheck import random_orders
from zbv_solver.plans.plan import identity
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.stages import Costs, Memory, Placement
from zbv_solver.problem.writing import problem_json
from zbv_worker.host.local_ranks import LocalRanks, python_command
from zbv_worker.training.ending import LEAVE_SECONDS

log = logging.getLogger(__name__)

P, TIMEOUT = 4, 6.0
LOST = 2
"""The rank with the stages 2 and 5 of the V; ranks 0 and 3 are not its neighbours' only ones."""


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    placement = Placement.of("v", P)
    ones = (1.0,) * placement.n_stages
    problem = Problem(placement, 8, Costs(ones, ones, ones, ones[1:]), Memory.unlimited(placement))
    document = {"problem": problem_json(problem), "ranks": random_orders(problem, Random(3)).all_text()}
    document["plan_id"] = identity(document["problem"], document["ranks"])  # type: ignore[arg-type]  # JSON
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    return path


def started(plan: Path, folder: Path, **model: object) -> LocalRanks:
    arguments = ["--model", "support.failing_model:failing", "--model-args", json.dumps(model)]
    numbers = ["--steps", "1000000", "--timeout", str(TIMEOUT), "--startup-timeout", "60", "--threads", "1"]
    command = python_command("zbv_worker.commands.cli", "run", "--plan-file", str(plan), *arguments, *numbers)
    return LocalRanks([command] * P, folder)


def ended(ranks: LocalRanks, others: set[int], since: float) -> float:
    """Wait until these ranks have ended by themselves; returns the seconds that took."""
    deadline = time.monotonic() + TIMEOUT + LEAVE_SECONDS
    while any(ranks.processes[rank].poll() is None for rank in others):
        assert time.monotonic() < deadline, "\n".join(ranks.log(rank) for rank in range(P))
        time.sleep(0.02)
    return time.monotonic() - since


def until_step(ranks: LocalRanks, step: int) -> None:
    deadline = time.monotonic() + 120
    while f"step {step}:" not in "".join(ranks.log(rank) for rank in range(P)):
        assert time.monotonic() < deadline, "\n".join(ranks.log(rank) for rank in range(P))
        time.sleep(0.02)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_rank_is_named_by_every_other_rank(
    plan_file: Path, tmp_path: Path, sign: signal.Signals
) -> None:
    with started(plan_file, tmp_path / "logs", stage=LOST, what="pause") as ranks:
        until_step(ranks, 3)
        os.kill(ranks.processes[LOST].pid, sign)
        seconds = ended(ranks, {0, 1, 3}, time.monotonic())
        if sign == signal.SIGSTOP:
            os.kill(ranks.processes[LOST].pid, signal.SIGKILL)
        for rank in {0, 1, 3}:
            assert f"rank {LOST} lost: it gives no sign of life" in ranks.log(rank), ranks.log(rank)
            assert "Traceback" not in ranks.log(rank)
            assert ranks.processes[rank].returncode == 1
    log.info(
        "rank %d got %s: the others ended after %.1f s (timeout %g s)", LOST, sign.name, seconds, TIMEOUT
    )


def test_a_rank_that_raises_an_error_says_so_and_the_others_repeat_it(
    plan_file: Path, tmp_path: Path
) -> None:
    with started(plan_file, tmp_path / "logs", stage=LOST, what="raise", after=20) as ranks:
        seconds = ended(ranks, set(range(P)), time.monotonic())
        assert "this stage cannot go on" in ranks.log(LOST)
        assert "Traceback" in ranks.log(LOST)
        for rank in {0, 1, 3}:
            assert re.search(rf"rank {LOST} lost: .*this stage cannot go on", ranks.log(rank)), ranks.log(
                rank
            )
    log.info("rank %d raised an error: all ranks ended within %.1f s of their start", LOST, seconds)


def test_an_interrupted_rank_says_so_without_a_traceback_and_the_others_end(
    plan_file: Path, tmp_path: Path
) -> None:
    with started(plan_file, tmp_path / "logs", stage=LOST, what="interrupt", after=20) as ranks:
        ended(ranks, set(range(P)), time.monotonic())
        assert f"zbv-worker: rank {LOST} was interrupted." in ranks.log(LOST)
        assert "Traceback" not in ranks.log(LOST)
        assert ranks.processes[LOST].returncode == 130
        for rank in {0, 1, 3}:
            assert f"rank {LOST} lost: rank {LOST} was interrupted" in ranks.log(rank), ranks.log(rank)


def test_a_rank_that_hangs_in_an_action_is_named_and_ends_as_well(plan_file: Path, tmp_path: Path) -> None:
    with started(plan_file, tmp_path / "logs", stage=LOST, what="hang", after=20) as ranks:
        seconds = ended(ranks, set(range(P)), time.monotonic())
        said = rf"rank {LOST} lost: it is alive, but does not get beyond step \d+, {LOST}F\d"
        for rank in {0, 1, 3}:
            assert re.search(said, ranks.log(rank)), ranks.log(rank)
        assert f"rank {LOST}, step" in ranks.log(LOST)
        assert "the other ranks gave this rank up" in ranks.log(LOST)
    log.info(
        "%s",
        f"rank {LOST} hung: all ranks ended within {seconds:.1f} s of their start (timeout {TIMEOUT:g} s)",
    )
