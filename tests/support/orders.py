"""Random orders for tests: valid, and good and bad in ways that no constructor is."""

from __future__ import annotations

from random import Random

from zbv_solver.plans.orders import Action, Orders
from zbv_solver.problem.problem import Problem


def random_orders(problem: Problem, random: Random) -> Orders:
    """An executable order: ranks take a random one of their ready actions, most often the soonest.

    Some ranks keep their W's to the end. Their windows then reach past everyone's, and such orders can have
    a span below that of their earliest starts: those ranks may begin later.
    """
    rank_of = problem.placement.rank_of
    keeps_weights = [rank > 0 and random.random() < 0.8 for rank in range(problem.pp_degree)]
    ranks: list[list[Action]] = [[] for _ in range(problem.pp_degree)]
    clock = [0.0] * problem.pp_degree
    ready = [(0.0, Action(0, "F", j)) for j in range(problem.microbatches)]
    while ready:
        candidates = [
            (max(clock[rank_of[action.stage]], since), place)
            for place, (since, action) in enumerate(ready)
            if action.letter != "W" or not keeps_weights[rank_of[action.stage]]
        ] or [(since, place) for place, (since, _) in enumerate(ready)]
        random.shuffle(candidates)
        start, place = min(candidates) if random.random() < 0.9 else candidates[0]
        action = ready.pop(place)[1]
        rank = rank_of[action.stage]
        ranks[rank].append(action)
        kind = problem.arrays.kind_of[action.microbatch]
        clock[rank] = start + float(problem.arrays.duration["FIWB".index(action.letter), action.stage, kind])
        ready += [(clock[rank] + lag, follower) for lag, follower in _followers(problem, action, random)]
    return Orders.from_actions(ranks)


def _followers(problem: Problem, action: Action, random: Random) -> list[tuple[float, Action]]:
    stage, letter, j = action
    transfer = problem.arrays.latency[:, problem.arrays.kind_of[j]]
    if letter == "F" and stage + 1 < problem.n_stages:
        return [(float(transfer[stage]), Action(stage + 1, "F", j))]
    if letter == "F":
        return [(0.0, Action(stage, random.choice("IIIB"), j))]
    found = [(0.0, Action(stage, "W", j))] if letter == "I" else []
    if letter in "IB" and stage > 0:
        found.append((float(transfer[stage - 1]), Action(stage - 1, random.choice("IIIB"), j)))
    return found
