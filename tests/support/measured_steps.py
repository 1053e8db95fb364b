"""Simulates measurements that differ from the plan, slowly and obviously, in whole nanoseconds."""

from __future__ import annotations

from random import Random
from typing import Any

from zbv_solver.plans.orders import Action
from zbv_solver.plans.plan import Plan


def noisy_traces(plan: Plan, seed: int, *, steps: int = 1, scale: int = 1000) -> list[dict[str, Any]]:
    """One document per rank; actions, transfers and what lies between actions take random times.

    ``scale`` is how many nanoseconds a planned unit is.
    """
    chance, problem = Random(seed), plan.problem
    p, stages = problem.pp_degree, problem.n_stages
    lists = [plan.orders.actions(rank) for rank in range(p)]
    rows: list[list[list[Any]]] = [[] for _ in range(p)]
    done: dict[Action, int] = {}
    entries: list[list[dict[str, Any]]] = [[] for _ in range(p)]
    begin = 0
    for step in range(steps):
        reached, free = [0] * p, [begin + chance.randrange(3 * scale) for _ in range(p)]
        while any(reached[rank] < len(lists[rank]) for rank in range(p)):
            for rank in range(p):
                while reached[rank] < len(lists[rank]):
                    action = lists[rank][reached[rank]]
                    source = _source(action, stages, done)
                    if source is None:
                        break
                    turned = free[rank] + chance.randrange(scale)
                    arrival = turned
                    if isinstance(source, Action):
                        is_near = problem.placement.rank_of[source.stage] == rank
                        under_way = 0 if is_near else chance.randrange(4 * scale)
                        arrival = max(turned, done[source] + under_way)
                    end = arrival + chance.randrange(6 * scale)
                    done[action], free[rank] = end, end
                    rows[rank].append([str(action), turned, arrival, end, 0])
                    reached[rank] += 1
        begin = max(free)
        for rank in range(p):
            seconds = (rows[rank][-1][3] - rows[rank][0][2]) / 1e9
            entries[rank].append({"step": step, "loss": None, "seconds": seconds, "actions": rows[rank]})
        rows, done = [[] for _ in range(p)], {}
    return [
        {"rank": rank, "pp_rank": rank, "replica": 0, "plan_id": plan.plan_id, "steps": entries[rank]}
        for rank in range(p)
    ]


def _source(action: Action, stages: int, done: dict[Action, int]) -> Action | bool | None:
    """The action whose output an action takes; True where it takes none, None where it is not made yet."""
    stage, letter, j = action
    if letter == "F":
        if stage == 0:
            return True
        source = Action(stage - 1, "F", j)
        return source if source in done else None
    if letter == "W":
        return True if Action(stage, "I", j) in done else None
    if Action(stage, "F", j) not in done:
        return None
    if stage == stages - 1:
        return True
    return next(
        (each for each in (Action(stage + 1, "I", j), Action(stage + 1, "B", j)) if each in done), None
    )
