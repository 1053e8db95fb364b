"""The verifier: accepts what a plain reference can execute, rejects everything else by name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.problems import limited, problems, uniform
from support.reference import Impossible, peak_memory, simulate
from zbv_solver.construct.list_scheduling import priority_schedules
from zbv_solver.errors import InvalidPlan
from zbv_solver.orders import Action, Orders
from zbv_solver.plan import Metrics, Plan
from zbv_solver.problem import Problem
from zbv_solver.search import SearchOptions, search
from zbv_solver.verify import verify, verify_orders

Ranks = list[list[Action]]
GOOD = [
    ["0F0", "3F0", "3I0", "3W0", "0B0"],
    ["1F0", "2F0", "2I0", "1I0", "1W0", "2W0"],
]


def swap(ranks: Ranks, random: Random) -> None:
    rank = random.choice(ranks)
    a, b = random.randrange(len(rank)), random.randrange(len(rank))
    rank[a], rank[b] = rank[b], rank[a]


def drop(ranks: Ranks, random: Random) -> None:
    rank = random.choice(ranks)
    del rank[random.randrange(len(rank))]


def repeat(ranks: Ranks, random: Random) -> None:
    rank = random.choice(ranks)
    rank.insert(random.randrange(len(rank)), random.choice(rank))


def move(ranks: Ranks, random: Random) -> None:
    source, target = random.choice(ranks), random.choice(ranks)
    target.insert(random.randrange(len(target) + 1), source.pop(random.randrange(len(source))))


def reletter(ranks: Ranks, random: Random) -> None:
    rank = random.choice(ranks)
    at = random.randrange(len(rank))
    rank[at] = rank[at]._replace(letter=random.choice("FIWB"))


def renumber(ranks: Ranks, random: Random) -> None:
    rank = random.choice(ranks)
    at = random.randrange(len(rank))
    rank[at] = rank[at]._replace(microbatch=rank[at].microbatch + random.choice((-1, 1)))


MUTATIONS: list[Callable[[Ranks, Random], None]] = [swap, drop, repeat, move, reletter, renumber]


def executable(problem: Problem, ranks: Ranks) -> bool:
    """The rules, written down plainly."""
    letters: dict[tuple[int, int], list[str]] = {}
    for rank, actions in enumerate(ranks):
        for stage, letter, j in actions:
            if stage not in problem.placement.stages_of[rank]:
                return False
            letters.setdefault((stage, j), []).append(letter)
    wanted = {(s, j) for s in range(problem.n_stages) for j in range(problem.microbatches)}
    if set(letters) != wanted or any(
        sorted(have) not in (["B", "F"], ["F", "I", "W"]) for have in letters.values()
    ):
        return False
    orders = Orders.from_actions(ranks)
    try:
        simulate(problem, orders)
    except Impossible:
        return False
    limits = problem.memory.limit
    return limits is None or all(
        peak <= limit + 1e-9 for peak, limit in zip(peak_memory(problem, orders), limits, strict=True)
    )


@given(
    problems(max_p=3, max_m=3),
    st.sampled_from([None, 0.0, 4.0]),
    st.lists(st.sampled_from(MUTATIONS), min_size=1, max_size=3),
    st.integers(0, 2**32),
)
def test_agrees_with_the_plain_rules_on_mutated_orders(
    problem: Problem,
    headroom: float | None,
    mutations: list[Callable[[Ranks, Random], None]],
    seed: int,
) -> None:
    if headroom is not None:
        problem = limited(problem, headroom)
    attempt = next(priority_schedules(problem, (1.0,)), None)
    if attempt is None:
        return
    random = Random(seed)
    ranks: Ranks = [attempt.orders.actions(rank) for rank in range(problem.pp_degree)]
    for mutate in mutations:
        if all(ranks):
            mutate(ranks, random)
    if any(action.microbatch < 0 for rank in ranks for action in rank):
        return  # no such text exists
    orders = Orders.from_actions(ranks)
    if executable(problem, ranks):
        verify_orders(problem, orders)
    else:
        with pytest.raises(InvalidPlan):
            verify_orders(problem, orders)


@pytest.mark.parametrize(
    ("rank", "actions", "says"),
    [
        (0, ["0F0", "3F0", "3I0", "0B0"], "stage 3 microbatch 0 has 1 F, 1 I, 0 W, 0 B"),
        (0, ["0F0", "3F0", "3I0", "3W0", "3W0", "0B0"], "2 W"),
        (0, ["0F0", "3F0", "3I0", "3W0", "0B0", "1F0"], "found 1F0 on rank 0"),
        (0, ["0F0", "3F0", "3W0", "3I0", "0B0"], "3W0 comes before 3I0"),
        (0, ["0F0", "3I0", "3F0", "3W0", "0B0"], "3I0 comes before 3F0"),
        (0, ["0F0", "3F0", "3I0", "3W0", "0B1"], "microbatches 0 to 0"),
        (0, ["3F0", "0F0", "3I0", "3W0", "0B0"], "deadlocks"),
    ],
)
def test_broken_rules_are_named(rank: int, actions: list[str], says: str) -> None:
    ranks = [list(GOOD[0]), list(GOOD[1])]
    verify_orders(uniform(2, 1), Orders.from_text(ranks))
    ranks[rank] = actions
    with pytest.raises(InvalidPlan, match=says):
        verify_orders(uniform(2, 1), Orders.from_text(ranks))


def test_a_memory_overflow_is_named() -> None:
    tight = limited(uniform(2, 1), 0.0)
    verify_orders(tight, Orders.from_text(GOOD))
    below = replace(tight, memory=replace(tight.memory, limit=(2.0, 1.5)))
    with pytest.raises(InvalidPlan, match=r"rank 1 needs 2 of memory; its limit is 1\.5"):
        verify_orders(below, Orders.from_text(GOOD))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return search(uniform(3, 5, limit=5, p2p=1), SearchOptions(effort="quick"))


@pytest.mark.parametrize(
    "change",
    [
        {"makespan": 1.001},
        {"span": 1.001},
        {"span": 0.999},
        {"lower_bound": 2.0},
        {"gap": 1.5},
        {"bubble_rate": 1.01},
        {"peak_memory": 1.01},
    ],
    ids=lambda change: "".join(change),
)
def test_false_metrics_are_refused(plan: Plan, change: dict[str, float]) -> None:
    verify(plan)
    ((name, factor),) = change.items()
    true = getattr(plan.metrics, name)
    false: Any = tuple(v * factor for v in true) if isinstance(true, tuple) else (true or 0.1) * factor
    with pytest.raises(InvalidPlan, match=name):
        verify(replace(plan, metrics=replace(plan.metrics, **{name: false})))


def test_a_false_claim_of_optimality_is_refused(plan: Plan) -> None:
    metrics: Metrics = replace(plan.metrics, lower_bound=plan.objective / 2, gap=1.0, status="optimal")
    with pytest.raises(InvalidPlan, match="optimal means a gap of 0"):
        verify(replace(plan, metrics=metrics))


def test_verifies_without_numba_too() -> None:
    """GPU nodes install no numba; they verify plan files all the same."""
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "from support.problems import uniform\n"
        "from zbv_solver.orders import Orders\n"
        "from zbv_solver.verify import verify_orders\n"
        f"good = {GOOD!r}\n"
        "verify_orders(uniform(2, 1), Orders.from_text(good))\n"
        "good[0][0], good[0][1] = good[0][1], good[0][0]\n"
        "try: verify_orders(uniform(2, 1), Orders.from_text(good))\n"
        "except Exception as error: print(error)"
    )
    made = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    assert "deadlocks" in made.stdout
