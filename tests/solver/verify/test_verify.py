"""The verifier accepts exactly the orders and lists with communication that can be executed."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from math import inf, nan
from random import Random
from typing import Any

import numpy as np
import pytest
import zbv_solver as zbv
from hypothesis import given, settings
from hypothesis import strategies as st
from support.orders import random_orders
from support.problems import limited, problems, uniform
from support.reference import Impossible, largest_cycle_mean, peak_memory, reach, simulate
from support.torch_lists import loaded_lists, torch_runtime
from zbv_solver.construct.dispatch import priority_schedules
from zbv_solver.export.torch_comms_csv import lowered
from zbv_solver.export.torch_csv import relabelled
from zbv_solver.plans.orders import Action, Orders
from zbv_solver.plans.plan import plan_json
from zbv_solver.search.assemble import make_plan
from zbv_solver.verify.communication import verify_comms
from zbv_solver.verify.verifier import verify, verify_orders

Ranks = list[list[Action]]
GOOD = [["0F0", "3F0", "3I0", "3W0", "0B0"], ["1F0", "2F0", "2I0", "1I0", "1W0", "2W0"]]
NUMBERS = ("makespan", "span", "bubble_rate", "lower_bound", "gap")


def mutate(ranks: Ranks, random: Random) -> None:
    """Move, repeat, drop or change an action."""
    source, target = random.choice(ranks), random.choice(ranks)
    at = random.randrange(len(source))
    action = source[at] if random.random() < 0.2 else source.pop(at)
    if random.random() < 0.2:
        action = action._replace(letter=random.choice("FIWB"))
    if random.random() < 0.2:
        action = action._replace(microbatch=action.microbatch + random.choice((-1, 1)))
    if random.random() < 0.8:
        target.insert(random.randrange(len(target) + 1), action)


def executable(problem: zbv.Problem, ranks: Ranks) -> bool:
    """The rules in their simplest form."""
    letters = {(stage, j): "" for stage in range(problem.n_stages) for j in range(problem.microbatches)}
    for rank, actions in enumerate(ranks):
        for stage, letter, j in actions:
            if (stage, j) not in letters or problem.placement.rank_of[stage] != rank:
                return False
            letters[stage, j] += letter
    if not {"".join(sorted(cell)) for cell in letters.values()} <= {"BF", "FIW"}:
        return False
    orders = Orders.from_actions(ranks)
    try:
        simulate(problem, orders)
    except Impossible:
        return False
    limits = problem.memory.limit or [inf] * problem.pp_degree
    return all(peak <= limit + 1e-9 for peak, limit in zip(peak_memory(problem, orders), limits, strict=True))


@given(problems(max_p=3, max_m=3), st.sampled_from([None, 0.0, 4.0]), st.randoms(use_true_random=True))
def test_the_verifier_agrees_with_the_plain_rules(problem: Any, headroom: Any, random: Random) -> None:
    """Orders are right, but for one to three mutations."""
    problem = problem if headroom is None else limited(problem, headroom)
    attempt = next(priority_schedules(problem, (1.0,)))
    ranks: Ranks = [attempt.orders.actions(rank) for rank in range(problem.pp_degree)]
    for _ in range(random.randint(1, 3)):
        if all(ranks):
            mutate(ranks, random)
    with nullcontext() if executable(problem, ranks) else pytest.raises(zbv.InvalidPlan):
        verify_orders(problem, Orders.from_actions(ranks))


def listed(text: str) -> Orders:
    """A good order, but for the list of rank 0."""
    return Orders.from_text([text.split(), GOOD[1]])


def divided(*offset: int) -> Orders:
    return replace(Orders.from_text(GOOD), offset=np.array(offset))


@pytest.mark.parametrize(("orders", "says"), [
    (listed("0F0 3F0 3I0 0B0"), "stage 3 microbatch 0 has 1 F, 1 I, 0 W, 0 B; it must have one F"),
    (listed("0F0 0F0 3F0 3I0 3W0 0B0"), "stage 0 microbatch 0 has 2 F"),
    (listed("0F0 3F0 3I0 3W0 0B0 1F0"), "found 1F0 on rank 0; placement v puts stage 1 on rank 1"),
    (listed("0F0 3F0 3W0 3I0 0B0"), "3W0 comes before 3I0"),
    (listed("0B0 0F0 3F0 3I0 3W0"), "0B0 comes before 0F0"),
    (listed("0F0 3F0 3I0 3W0 0B1"), "found 0B1; .* microbatches 0 to 0"),
    (listed("0F0 3F0 3I0 3W0 4B0"), "found 4B0; stages are 0 to 3"),
    (listed("3F0 0F0 3I0 3W0 0B0"), "deadlocks: 11 actions .* among them 3F0"),
    (Orders.pack([[(-1, 0, 0)], []]), "found -1F0; stages are 0 to 3"),
    (Orders.pack([[(0, 0, -1)], []]), "found 0F-1; .* microbatches 0 to 0"),
    (Orders.pack([[(0, 4, 0)], []]), r"found 0\(letter 4\)0"),
    (Orders.pack([[(0, -1, 0)], []]), r"found 0\(letter -1\)0"),
    (divided(1, 5, 11), "lists overlap or miss actions"),
    (divided(0, 5, 10), "lists overlap or miss actions"),
    (divided(0, 12, 11), "lists overlap or miss actions"),
    (divided(0, 11), "found 1 ranks; the problem has 2"),
    (Orders.from_text(GOOD), r"rank 0 needs 2 of memory; its limit is 1\.9"),
])  # fmt: skip
def test_broken_rules_are_reported(orders: Orders, says: str) -> None:
    verify_orders(uniform(2, 1), Orders.from_text(GOOD))
    with pytest.raises(zbv.InvalidPlan, match=says):
        verify_orders(uniform(2, 1, limit=1.9 if "memory" in says else None), orders)


@pytest.fixture(scope="module")
def plan() -> zbv.Plan:
    return zbv.plan(uniform(3, 5, limit=5, p2p=1), "quick")


@pytest.mark.parametrize(("change", "says"), [
    (lambda m: {"makespan": 1.001 * m.makespan}, "makespan"),
    (lambda m: {"span": 1.001 * m.span}, "span .* too large"),
    (lambda m: {"span": 0.999 * m.span}, "span .* too small"),
    (lambda m: {"lower_bound": 2 * m.lower_bound}, "lower_bound .* is no bound"),
    (lambda m: {"gap": 1.5 * (m.gap or 0.1)}, "gap"),
    (lambda m: {"bubble_rate": 1.01 * m.bubble_rate}, "bubble_rate"),
    (lambda m: {"peak_memory": tuple(1.01 * peak for peak in m.peak_memory)}, "peak_memory of rank 0"),
    (lambda m: {"peak_memory": m.peak_memory[:2]}, "peak_memory states 2 ranks, not 3"),
    (lambda m: {"lower_bound": m.span / 2, "gap": 1.0, "status": "optimal"}, "means a gap of 0"),
    *((lambda _, name=name: {name: nan}, f"{name} .* must be a finite") for name in NUMBERS),
    *((lambda _, name=name: {name: inf}, f"{name} .* must be a finite") for name in NUMBERS[:4]),
    (lambda _: {"peak_memory": (nan,) * 3}, "peak_memory .* must be a finite"),
    (lambda _: {"peak_memory": (inf,) * 3}, "peak_memory .* must be a finite"),
])  # fmt: skip
def test_false_metrics_are_refused(plan: zbv.Plan, change: Callable[[zbv.Metrics], Any], says: str) -> None:
    verify(plan)
    with pytest.raises(zbv.InvalidPlan, match=says):
        verify(replace(plan, metrics=replace(plan.metrics, **change(plan.metrics))))


@given(problems(max_p=5, max_m=5, kinds=("v", "loop", "single")), st.integers(0, 2**32))
def test_only_the_true_span_passes(problem: zbv.Problem, seed: int) -> None:
    orders = random_orders(problem, Random(seed))
    made = make_plan(problem, orders, method="random", lower_bound=0.0)  # verifies
    true = largest_cycle_mean(reach(problem, orders))
    assert made.metrics.span == pytest.approx(true, rel=1e-12)
    busy = (1 - made.metrics.bubble_rate) * made.metrics.span
    for factor in (0.5, 1 - 1e-6, 1 + 1e-6, 2.0) if true > 0 else ():
        metrics = replace(made.metrics, span=true * factor, bubble_rate=1 - busy / (true * factor))
        says = "small" if factor < 1 else "large"
        with pytest.raises(zbv.InvalidPlan, match=f"the stated span .* is too {says}"):
            verify(replace(made, metrics=metrics))


def test_plans_are_verified_without_numba(plan: zbv.Plan) -> None:
    """GPU nodes verify plan files, and have no Numba. Nor is it imported before a plan is verified."""
    code = """
import json, sys
from zbv_solver.errors import InvalidPlan
from zbv_solver.plans.reading import parse_plan
from zbv_solver.verify.verifier import verify
print(sys.modules.get("numba"))
sys.modules["numba"] = None
for document in json.load(sys.stdin):
    try: print(verify(parse_plan(document)))
    except InvalidPlan as error: print(error)
"""
    good = plan_json(plan) | {"plan_id": None}
    false = good | {"metrics": good["metrics"] | {"span": 2 * plan.metrics.span}}
    stuck = good | {"ranks": [good["ranks"][0][::-1], *good["ranks"][1:]]}
    command, asked = [sys.executable, "-W", "error", "-c", code], json.dumps([good, false, stuck])
    made = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=120, check=True)
    before, fine, span, order = made.stdout.splitlines()
    assert (before, fine, "too large" in span, "depends on it" in order) == ("None", "None", True, True)


def loaded(problem: zbv.Problem, rank: int, lists: list[list[str]], kind: str, **options: bool) -> Any:
    """The lists with communication that a rank's runtime of PyTorch makes of a file."""
    runtime = torch_runtime(problem, rank, **options)
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.writelines(",".join(texts) + "\n" for texts in lists)
        file.flush()
        runtime._load_csv(file.name, format=kind)
    assert runtime.stage_index_to_group_rank == dict(enumerate(problem.placement.rank_of))
    return loaded_lists(runtime)


@settings(max_examples=50, deadline=None)
@given(problems(kinds=("v", "loop", "single")), st.randoms(use_true_random=True))
def test_exported_lists_and_those_of_pytorch_are_accepted(problem: zbv.Problem, random: Random) -> None:
    orders = relabelled(random_orders(problem, random), problem.n_stages)
    lists = lowered(problem, orders)
    verify_comms(problem, orders, lists)
    for rank in range(problem.pp_degree):
        assert loaded(problem, rank, lists, "compute_comms") == lists
    if problem.placement.kind != "loop":
        verify_comms(problem, orders, loaded(problem, 0, orders.all_text(), "compute_only"))


def test_deferred_receives_on_a_v_are_refused() -> None:
    """``defer_pp_recv=True`` gives wrong gradients and no error."""
    problem = uniform(2, 4)
    orders = relabelled(random_orders(problem, Random(0)), 4)
    lists = loaded(problem, 0, orders.all_text(), "compute_only", defer_pp_recv=True)
    with pytest.raises(zbv.InvalidPlan, match=r"ranks 0 and 1: transfer .*in one order.*defer_pp_recv"):
        verify_comms(problem, orders, lists)


@pytest.mark.parametrize(("forward", "parts"), [
    # A slow second rank: all activations arrive before it has run anything.
    ([1, 10], ["0SEND_F1 0F2 0SEND_F2 0RECV_B0 0B0", "1RECV_F0 1RECV_F1 1RECV_F2 1F0 1B0 1SEND_B0"]),
    # A slow first rank: the first gradient arrives before its second forward ends.
    ([10, 1], ["0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1", "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1"]),
])  # fmt: skip
def test_a_receive_is_listed_when_its_tensor_is_produced(forward: list[int], parts: list[str]) -> None:
    """Otherwise a rank would block a communicator with a receive long before its send."""
    costs = {"forward": forward, "backward_input": 1, "backward_weight": 1}
    rows = ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]
    lists = lowered(uniform(2, 3, placement="single", costs=costs), Orders.from_text([*map(str.split, rows)]))
    assert all(part in " ".join(texts) for texts, part in zip(lists, parts, strict=True))


@pytest.mark.parametrize(("change", "says"), [
    ({"0F1": ["0F1xyz"]}, r"rank 0: found '0F1xyz'"),
    ({"0F1": [""]}, r"rank 0: found ''"),
    ({"0F1": ["0F1", "0F1"]}, r"rank 0: action 2 is 0F1; the plan has"),
    ({"0F1": []}, r"rank 0: action 1 is .*; the plan has 0F1"),
    ({"0REDUCE_GRAD": []}, r"rank 0: stage 0 must have one .*0REDUCE_GRAD.*too large"),
    ({"1REDUCE_GRAD": ["1RESHARD"], "1RESHARD": ["1REDUCE_GRAD"]}, r"rank 1: stage 1 must have"),
    ({"3UNSHARD": []}, r"rank 0: stage 3 must have one 3UNSHARD"),
    ({"1RESHARD": ["1RESHARD", "1RESHARD"]}, r"rank 1: 1RESHARD comes twice"),
    ({"0SEND_F1": []}, r"0SEND_F1 has only one end"),
    ({"1RECV_F1": []}, r"rank 1: 1F1 comes before 1RECV_F1, which it needs"),
    ({"0RECV_B1": []}, r"rank 0: 0I1 comes before 0RECV_B1"),
    ({"0F1": ["0SEND_F1"], "0SEND_F1": ["0F1"]}, r"rank 0: 0SEND_F1 comes before 0F1"),
    ({"1I1": ["1SEND_B1"], "1SEND_B1": ["1I1"]}, r"rank 1: 1SEND_B1 comes before 1I1 or 1B1"),
    ({"1F0": ["1F0", "1SEND_F0"]}, r"rank 1: found 1SEND_F0; that tensor does not cross"),
    ({"3F0": ["3F0", "3SEND_F0"]}, r"rank 0: found 3SEND_F0; that tensor does not cross"),
    ({"1RECV_F0": ["1RECV_F1"], "1RECV_F1": ["1RECV_F0"]}, r"(1RECV_F0|in one order)"),
])  # fmt: skip
def test_a_wrong_list_is_refused(change: dict[str, list[str]], says: str) -> None:
    problem = uniform(2, 2)
    rows = (
        "0F0 0F1 3F0 3I0 3F1 3I1 3W0 3W1 0I0 0I1 0W0 0W1",
        "1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1W0 2W1 1W1",
    )
    orders = Orders.from_text([*map(str.split, rows)])
    lists = lowered(problem, orders)
    verify_comms(problem, orders, lists)
    wrong = [[entry for text in texts for entry in change.get(text, [text])] for texts in lists]
    assert wrong != lists
    with pytest.raises(zbv.InvalidPlan, match=says):
        verify_comms(problem, orders, wrong)
    with pytest.raises(zbv.InvalidPlan, match="found lists of 1 ranks"):
        verify_comms(problem, orders, lists[:1])


def test_forwards_of_the_last_stage_must_be_in_order() -> None:
    """The runtime would take one microbatch's loss for another's."""
    problem = uniform(1, 2)
    orders = Orders.from_text([["0F0", "0F1", "1F1", "1F0", "1B0", "0B0", "1B1", "0B1"]])
    with pytest.raises(zbv.InvalidPlan, match=r"1F1 as its forward number 0.*Relabel"):
        verify_comms(problem, orders, lowered(problem, orders))
    labelled = relabelled(orders, 2)
    verify_comms(problem, labelled, lowered(problem, labelled))


def test_sends_that_wait_in_a_cycle_are_refused() -> None:
    """Every pair of ranks agrees on an order, but no rank can continue."""
    problem = uniform(3, 1, placement="loop", chunks=2)
    orders = Orders.from_text([[f"{r}F0", f"{r + 3}F0", f"{r + 3}B0", f"{r}B0"] for r in range(3)])
    lists = lowered(problem, orders)
    verify_comms(problem, orders, lists)
    # Rank 0 waits for stage 3's activation, which depends on an activation that stage 0 has yet to produce.
    lists[0].remove("3RECV_F0")
    lists[0].insert(lists[0].index("0F0"), "3RECV_F0")
    with pytest.raises(zbv.InvalidPlan, match=r"can wait forever at"):
        verify_comms(problem, orders, lists)
