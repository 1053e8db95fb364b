"""Steps of processes that share cores: processes of a core that compute at the same time are slower.

A plan's times hold if every rank has its own device. With more processes than cores, a core divides its
time equally among its processes that compute (processor sharing; Kleinrock 1967). Those that wait for
a tensor leave it to the others, so a bubble costs less than the plan says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zbv_solver.plans.orders import Action
    from zbv_solver.plans.plan import Plan

STEPS = 4
"""Simulated steps; the first is not counted."""
Key = tuple[int, str, int, int, int]
"""What an action waits for: stage, F or I, microbatch, replica and step."""


@dataclass(frozen=True)
class PerStep:
    """What each pipeline rank does once per step, in the plan's time unit."""

    exchange: Sequence[float]
    """Time in which its replicas sum gradients, together and without computing."""
    update: Sequence[float]
    """Time of the optimizer's step on a separate core."""


@dataclass(frozen=True)
class _Task:
    """Something that a process does: after ``needs``, compute for ``work``, then others may begin."""

    work: float
    needs: tuple[Key, ...] = ()
    gives: Key | None = None
    exchange: tuple[int, int] | None = None
    ends_step: bool = False


@dataclass
class _Process:
    core: int
    tasks: list[_Task]
    at: int = 0
    left: float = 0.0
    begins: float | None = None
    """When the current task may compute; None if that is not known yet."""
    ends: list[float] = field(default_factory=list)

    @property
    def task(self) -> _Task | None:
        """The current task."""
        return self.tasks[self.at] if self.at < len(self.tasks) else None


def step_time(plan: Plan, replicas: int, cores: int, once: PerStep) -> float:
    """The mean time of a step, in the plan's unit.

    Process r * replicas + d is rank r of replica d, and has core number r * replicas + d modulo ``cores``.
    """
    p = plan.problem.pp_degree
    processes = [
        _Process((rank * replicas + d) % cores, [*_tasks(plan, rank, d, once)])
        for rank in range(p)
        for d in range(replicas)
    ]
    arrivals: dict[Key, float] = {}
    meetings: dict[tuple[int, int], list[float]] = {}
    now = 0.0
    while any(process.task is not None for process in processes):
        for process in processes:
            _start(process, now, arrivals, meetings, replicas, once)
        busy = [each for each in processes if each.begins is not None and each.begins <= now]
        on_core = Counter(each.core for each in busy)
        waits = [each.begins - now for each in processes if each.begins is not None and each.begins > now]
        step = min([*waits, *(each.left * on_core[each.core] for each in busy)])
        now += step
        for process in busy:
            process.left -= step / on_core[process.core]
            if process.left <= 1e-9:
                _finish(process, now, arrivals, plan)
    first, last = (max(process.ends[at] for process in processes) for at in (0, -1))
    return (last - first) / (STEPS - 1)


def _start(
    process: _Process,
    now: float,
    arrivals: Mapping[Key, float],
    meetings: dict[tuple[int, int], list[float]],
    replicas: int,
    once: PerStep,
) -> None:
    """Find when the current task of a process may begin."""
    task = process.task
    if task is None or process.begins is not None:
        return
    if task.exchange is not None:
        met = meetings.setdefault(task.exchange, [])
        if process.left == 0.0:  # it has just come to this task
            met.append(now)
            process.left = task.work
        if len(met) == replicas:
            process.begins = max(met) + once.exchange[task.exchange[0]] * (replicas > 1)
    elif all(key in arrivals for key in task.needs):
        process.begins = max([now, *(arrivals[key] for key in task.needs)])
        process.left = task.work


def _finish(process: _Process, now: float, arrivals: dict[Key, float], plan: Plan) -> None:
    task = process.tasks[process.at]
    if task.gives is not None:
        arrivals[task.gives] = now + _transfer(plan, task.gives)
    if task.ends_step:
        process.ends.append(now)
    process.at, process.left, process.begins = process.at + 1, 0.0, None


def _transfer(plan: Plan, of: Key) -> float:
    stage, letter, *_ = of
    boundary = stage if letter == "F" else stage - 1
    problem = plan.problem
    ranks = problem.placement.rank_of
    if not 0 <= boundary < problem.n_stages - 1 or ranks[boundary] == ranks[boundary + 1]:
        return 0.0
    return float(problem.arrays.latency[boundary, 0])


def _tasks(plan: Plan, rank: int, replica: int, once: PerStep) -> Iterator[_Task]:
    for step in range(STEPS):
        for action in plan.orders.actions(rank):
            yield _action(plan, action, replica, step)
        yield _Task(max(once.update[rank], 1e-6), exchange=(rank, step), ends_step=True)


def _action(plan: Plan, action: Action, replica: int, step: int) -> _Task:
    problem, (stage, letter, j) = plan.problem, (action.stage, action.letter, action.microbatch)
    work = float(problem.arrays.duration["FIWB".index(letter), stage, 0])
    last = problem.n_stages - 1
    if letter == "F":
        needs = ((stage - 1, "F", j, replica, step),) if stage else ()
        return _Task(work, needs, (stage, "F", j, replica, step))
    if letter == "W":
        return _Task(work)
    needs = ((stage + 1, "I", j, replica, step),) if stage < last else ()
    return _Task(work, needs, (stage, "I", j, replica, step))
