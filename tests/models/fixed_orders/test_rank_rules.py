"""What ``cut.first``, ``last`` and ``allow_empty`` mean for an executor, and the reasons of refusals."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from support.executor_layers import layer, layered
from zbv_models.fixed_orders.best_cut import BestCut, best_cut
from zbv_models.fixed_orders.executor_cut import cut_for_executor
from zbv_models.fixed_orders.schedules import megatron_schedule
from zbv_solver.errors import InvalidInput
from zbv_solver.problem.layered_problem import LayeredProblem


def model_of(blocks: int, ranks: int, cut: dict[str, Any]) -> LayeredProblem:
    layers = [layer("embedding", 1), layer("block", 10, repeat=blocks), layer("head", 12)]
    return layered(ranks, 2 * ranks, layers, cut=cut)


def blocks_of(best: BestCut) -> list[int]:
    """The transformer layers of every stage."""
    assert best.problem.model is not None
    before = best.problem.model.model.blocks_before
    return [before[end] - before[begin] for begin, end in pairwise(best.problem.model.cut.bounds)]


def test_first_and_last_are_transformer_layers_of_ranks() -> None:
    """Megatron-LM divides those of a rank evenly over its virtual stages."""
    one = cut_for_executor(
        model_of(8, 2, {"first": 3, "last": 5}), "megatron", virtual_stages=[1], effort="quick"
    )
    assert one.stages == ("Ettt", "tttttL")
    two = best_cut(model_of(12, 3, {"first": 2, "last": 6}), [megatron_schedule(3, 6, 2)], effort="quick")
    counts = blocks_of(two)
    assert (counts[0], counts[3], counts[2], counts[5]) == (1, 1, 3, 3)
    assert two.is_optimal
    only = best_cut(model_of(13, 3, {"last": 3}), [megatron_schedule(3, 6, 3)], effort="quick")
    assert blocks_of(only)[2::3] == [1, 1, 1]


def test_schedules_that_cannot_keep_a_rule_are_named_with_the_reason() -> None:
    best = cut_for_executor(model_of(8, 2, {"first": 3, "last": 5}), "megatron", effort="quick").best
    assert best.schedule.name == "1F1B"
    reasons = {schedule.placement.chunks: issue for schedule, issue in best.refused.items()}
    assert set(reasons) == {2, 3, 4}
    assert reasons[2].pointer == "/cut/first"
    assert "found 3 transformer layers on the first rank, which has 2 virtual stages" in reasons[2].detail
    assert reasons[3].pointer == "/cut/last"


@pytest.mark.parametrize(
    ("blocks", "ranks", "cut", "message"),
    [
        # Megatron-LM#2718: 24 of 48 layers were on no rank, without a word.
        (
            48,
            2,
            {"first": 11, "last": 13},
            "together 24 of 48 transformer layers, so 24 of the model's layers",
        ),
        (8, 2, {"first": 5, "last": 4}, "1 more than the model has"),
        (8, 4, {"first": 5, "last": 4}, "1 more than the model has"),
        (8, 1, {"first": 3}, "has all 8 transformer layers"),
    ],
)
def test_contradictions_are_refused(blocks: int, ranks: int, cut: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        cut_for_executor(model_of(blocks, ranks, cut), "megatron", effort="quick")
    assert message in str(raised.value)


def test_empty_stages_are_forbidden_only_if_the_problem_says_so() -> None:
    schedule = megatron_schedule(4, 8, 2)
    free = best_cut(model_of(6, 4, {}), [schedule], allow_empty=True, effort="quick")
    forbidden = best_cut(model_of(6, 4, {"allow_empty": False}), [schedule], allow_empty=True, effort="quick")
    assert free.least <= forbidden.least
    assert forbidden.problem.model is not None
    assert all(forbidden.problem.model.partition)
    best_cut(model_of(3, 4, {"allow_empty": True}), [schedule], allow_empty=True, effort="quick")


@pytest.mark.parametrize(
    ("executor", "cut", "chunks", "advice"),
    [
        ("megatron", {"allow_empty": False}, 2, {"virtual", "ranks", "allow_empty"}),
        ("torch", {}, 2, {"virtual", "ranks"}),
        ("torch", {"allow_empty": True}, 2, {"virtual", "ranks"}),
        ("torch", {"allow_empty": True}, 1, {"ranks"}),
        ("torchtitan", {"allow_empty": True}, 1, {"ranks"}),
    ],
)
def test_too_few_layers_are_refused_with_what_the_executor_can_do(
    executor: str, cut: dict[str, bool], chunks: int, advice: set[str]
) -> None:
    problem = model_of(1 if cut.get("allow_empty") else 2, 4, cut)
    with pytest.raises(InvalidInput) as raised:
        cut_for_executor(problem, executor, virtual_stages=[chunks], effort="quick")
    assert {word for word in ("virtual", "ranks", "allow_empty") if word in str(raised.value)} == advice
    assert "finer layers" in str(raised.value)


@pytest.mark.parametrize("end", ["first", "last"])
def test_an_end_rank_without_transformer_layers_has_one_stage_if_none_may_be_empty(end: str) -> None:
    best = cut_for_executor(model_of(6, 4, {end: 0}), "torch", effort="quick").best
    assert best.schedule.name == "1F1B"
    assert blocks_of(best)[0 if end == "first" else -1] == 0
    (issue, *_) = best.refused.values()
    assert issue.pointer == f"/cut/{end}"
    assert f"found 0 transformer layers on the {end} rank, which has 2 virtual stages" in issue.detail
