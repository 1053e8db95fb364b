"""Starts runs of which one rank fails, and waits until the others have ended."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from random import Random

from zbv_worker.host.local_ranks import LocalRanks, python_command
from zbv_worker.transport.world import Backend

from support.plans import unit_problem, write_plan
from support.processes import DEADLINE, wait_until
from support.selfcheck import random_orders

TIMEOUT = 10.0


def started(folder: Path, ranks: int, backend: Backend = "gloo", **model: object) -> LocalRanks:
    """Ranks of a V that train :mod:`support.failing_model` without end."""
    problem = unit_problem(ranks, 8)
    plan = write_plan(folder / "plan.json", problem, random_orders(problem, Random(3)))
    arguments = ["--model", "support.failing_model:failing", "--model-args", json.dumps(model)]
    numbers = ["--steps", "1000000", "--timeout", str(TIMEOUT), "--startup-timeout", "240", "--threads", "1"]
    command = ["run", "--plan-file", str(plan), "--backend", backend, *arguments, *numbers]
    return LocalRanks([python_command("zbv_worker.commands.cli", *command)] * ranks, folder / "logs")


def ended(ranks: LocalRanks, others: Iterable[int], since: float) -> float:
    """Wait until these ranks have ended by themselves; returns the seconds that took."""
    deadline = time.monotonic() + DEADLINE
    while any(ranks.processes[rank].poll() is None for rank in others):
        assert time.monotonic() < deadline, all_logs(ranks)
        time.sleep(0.02)
    return time.monotonic() - since


def until_step(ranks: LocalRanks, step: int) -> None:
    wait_until(lambda: f"step {step}:" in all_logs(ranks), f"step {step}")


def all_logs(ranks: LocalRanks) -> str:
    return "\n".join(ranks.log(rank) for rank in range(len(ranks.processes)))
