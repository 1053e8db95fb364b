"""Random orders for tests: valid, and good and bad in ways that no constructor is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import numpy as np
from zbv_solver.construct.dispatch import serial
from zbv_solver.plans.orders import Action, Orders, first_in_first_out
from zbv_solver.problem.numeric import exceeds
from zbv_solver.problem.problem import LETTERS, Problem


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


def fitting_orders(problem: Problem, random: Random, count: int) -> Iterator[Orders]:
    """Up to ``count`` random orders that keep the memory limit, and the serial one.

    Ranks run any action of any microbatch that fits, some letters more often than others. Orders that get
    stuck are left out. Equal microbatches ascend.
    """
    for _ in range(count):
        weights = {letter: random.choice([0.1, 1.0, 1.0, 10.0]) for letter in LETTERS}
        orders = _fitting_order(problem, random, weights)
        if orders is not None:
            yield first_in_first_out(orders, problem.n_stages) if problem.is_equal else orders
    yield serial(problem).orders


def _fitting_order(problem: Problem, random: Random, weights: dict[str, float]) -> Orders | None:
    arrays, n, rank_of = problem.arrays, problem.n_stages, problem.placement.rank_of
    held = arrays.static.copy()
    visits = [0] * problem.microbatches  # of 2 n
    weight_of: list[Action] = []
    ranks: list[list[Action]] = [[] for _ in range(problem.pp_degree)]

    def change(action: Action) -> float:
        kind = arrays.kind_of[action.microbatch]
        return float(arrays.delta[LETTERS.index(action.letter), action.stage, kind])

    def fits(action: Action) -> bool:
        rank = rank_of[action.stage]
        return not exceeds(held[rank] + max(0.0, change(action)), arrays.limit[rank])

    while weight_of or min(visits) < 2 * n:
        ready = list(weight_of)
        for j, at in enumerate(visits):
            if at < n:
                ready.append(Action(at, "F", j))
            elif at < 2 * n:
                ready += [Action(2 * n - 1 - at, letter, j) for letter in "IB"]
        fitting = [*filter(fits, ready)]
        if not fitting:
            return None
        action = random.choices(fitting, [weights[action.letter] for action in fitting])[0]
        rank = rank_of[action.stage]
        held[rank] += change(action)
        ranks[rank].append(action)
        if action.letter == "W":
            weight_of.remove(action)
        else:
            visits[action.microbatch] += 1
            weight_of += [Action(action.stage, "W", action.microbatch)] if action.letter == "I" else []
    return Orders.from_actions(ranks)


def copied_at_random(orders: Orders, random: Random) -> Orders:
    """Some microbatches get an O, D and R at random places between their F and their I or B."""
    ranks = []
    for rank in range(orders.pp_degree):
        entries = [str(action) for action in orders.actions(rank)]
        for action in orders.actions(rank):
            if action.letter == "F" or action.letter == "W" or random.random() < 0.5:
                continue
            name = f"{action.stage}{{}}{action.microbatch}"
            first = entries.index(name.format("F")) + 1
            for letter in "ODR":
                last = entries.index(str(action))
                first = random.randint(first, last)
                entries.insert(first, name.format(letter))
                first += 1
        ranks.append(entries)
    return Orders.from_text(ranks)


def paired_at_random(orders: Orders, random: Random) -> Orders:
    """Forwards become pairs with the backward after them, if it is of another microbatch."""
    letters, microbatch = "".join(LETTERS[code] for code in orders.letter), orders.microbatch
    ranks, paired = orders.rank_index(), np.zeros(len(orders), dtype=np.bool_)
    for at in range(len(orders) - 1):
        is_possible = letters[at : at + 2] in ("FI", "FB") and ranks[at] == ranks[at + 1]
        paired[at] = is_possible and microbatch[at] != microbatch[at + 1] and random.random() < 0.7
    return replace(orders, paired=paired) if paired.any() else orders
