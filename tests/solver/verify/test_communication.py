"""Lists with communication for PyTorch's runtime: exported lists pass every check, wrong ones are refused."""

from __future__ import annotations

import tempfile
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.orders import random_orders
from support.problems import problems, uniform, uniform_document
from support.torch_lists import loaded_lists, torch_runtime
from zbv_solver.errors import InvalidPlan
from zbv_solver.export.torch_comms_csv import lowered
from zbv_solver.export.torch_csv import relabelled
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_problem
from zbv_solver.verify.communication import verify_comms

Lists = list[list[str]]


def orders_of(problem: Problem, random: Random) -> Orders:
    return relabelled(random_orders(problem, random), problem.n_stages)


def loaded(problem: Problem, rank: int, lists: Lists, kind: str, **options: bool) -> Lists:
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
def test_the_check_accepts_exported_lists_and_those_that_pytorch_makes_of_a_plan(
    problem: Problem, random: Random
) -> None:
    orders = orders_of(problem, random)
    lists = lowered(problem, orders)
    verify_comms(problem, orders, lists)
    for rank in range(problem.pp_degree):
        assert loaded(problem, rank, lists, "compute_comms") == lists
    if problem.placement.kind != "loop":
        verify_comms(problem, orders, loaded(problem, 0, orders.all_text(), "compute_only"))


def test_deferred_receives_on_a_v_are_refused() -> None:
    """``defer_pp_recv=True`` gives wrong gradients and no error."""
    problem = uniform(2, 4)
    orders = orders_of(problem, Random(0))
    lists = loaded(problem, 0, orders.all_text(), "compute_only", defer_pp_recv=True)
    with pytest.raises(InvalidPlan, match=r"ranks 0 and 1: transfer .*in one order.*defer_pp_recv"):
        verify_comms(problem, orders, lists)


@pytest.mark.parametrize(
    ("forward", "first", "second"),
    [
        # A slow second rank: all activations arrive before it has run anything.
        ([1, 10], "0SEND_F1 0F2 0SEND_F2 0RECV_B0 0B0", "1RECV_F0 1RECV_F1 1RECV_F2 1F0 1B0 1SEND_B0"),
        # A slow first rank: the first gradient arrives before its second forward ends.
        ([10, 1], "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1", "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1"),
    ],
)
def test_a_receive_is_listed_when_its_tensor_is_produced(forward: list[int], first: str, second: str) -> None:
    """Otherwise a rank would block a communicator with a receive long before its send."""
    costs = {"forward": forward, "backward_input": 1, "backward_weight": 1}
    problem = parse_problem({"pp_degree": 2, "microbatches": 3, "placement": "single", "costs": costs})
    one_by_one = ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]
    orders = Orders.from_text([["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"], one_by_one])
    for texts, part in zip(lowered(problem, orders), (first, second), strict=True):
        assert part in " ".join(texts)


def test_an_order_that_deadlocks_is_refused() -> None:
    problem = uniform(2, 1)
    orders = Orders.from_text([["0F0", "3F0", "3B0", "0B0"], ["2F0", "1F0", "2B0", "1B0"]])
    with pytest.raises(InvalidPlan, match="rank 0 waits forever at 3F0"):
        lowered(problem, orders)


@pytest.mark.parametrize(
    ("change", "says"),
    [
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
    ],
)
def test_a_wrong_list_is_refused(change: dict[str, list[str]], says: str) -> None:
    problem = uniform(2, 2)
    orders = Orders.from_text(
        [
            ["0F0", "0F1", "3F0", "3I0", "3F1", "3I1", "3W0", "3W1", "0I0", "0I1", "0W0", "0W1"],
            ["1F0", "2F0", "1F1", "2F1", "2I0", "1I0", "2I1", "1I1", "2W0", "1W0", "2W1", "1W1"],
        ]
    )
    lists = lowered(problem, orders)
    verify_comms(problem, orders, lists)
    wrong = [[entry for text in texts for entry in change.get(text, [text])] for texts in lists]
    assert wrong != lists
    with pytest.raises(InvalidPlan, match=says):
        verify_comms(problem, orders, wrong)
    with pytest.raises(InvalidPlan, match="found lists of 1 ranks"):
        verify_comms(problem, orders, lists[:1])


def test_forwards_of_the_last_stage_must_be_in_order() -> None:
    """The runtime would take one microbatch's loss for another's."""
    problem = uniform(1, 2)
    orders = Orders.from_text([["0F0", "0F1", "1F1", "1F0", "1B0", "0B0", "1B1", "0B1"]])
    with pytest.raises(InvalidPlan, match=r"1F1 as its forward number 0.*Relabel"):
        verify_comms(problem, orders, lowered(problem, orders))
    labelled = relabelled(orders, 2)
    verify_comms(problem, labelled, lowered(problem, labelled))


def test_sends_that_wait_in_a_cycle_are_refused() -> None:
    """Every pair of ranks agrees on an order, but no rank can continue."""
    problem = parse_problem({**uniform_document(3, 1), "placement": "loop", "chunks": 2})
    orders = Orders.from_text([[f"{r}F0", f"{r + 3}F0", f"{r + 3}B0", f"{r}B0"] for r in range(3)])
    lists = lowered(problem, orders)
    verify_comms(problem, orders, lists)
    # Rank 0 waits for stage 3's activation, which depends on an activation that stage 0 has yet to produce.
    first = lists[0]
    first.remove("3RECV_F0")
    first.insert(first.index("0F0"), "3RECV_F0")
    with pytest.raises(InvalidPlan, match=r"can wait forever at"):
        verify_comms(problem, orders, lists)
