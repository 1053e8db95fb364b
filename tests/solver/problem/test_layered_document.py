"""Layered problems as documents: their meaning, and the errors for invalid ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from support.cuts import BLOCK, EMBEDDING, HEAD, RECOMPUTE, document, every_cut, layered, layered_problems
from support.paths import ROOT
from zbv_solver.errors import InvalidInput
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_any_problem, parse_problem
from zbv_solver.problem.stages import Placement
from zbv_solver.problem.writing import layered_json, problem_json

V = Placement.of("v", 2)


def issues(**changes: Any) -> dict[str, str]:
    with pytest.raises(InvalidInput) as caught:
        parse_any_problem(document(**changes))
    return {issue.pointer: issue.detail for issue in caught.value.issues}


def cut(problem: LayeredProblem, *bounds: int, recompute: tuple[bool, ...] | None = None) -> Problem:
    return problem.cut_into(V, Cut.at(bounds, recompute))


def test_copies_are_numbered_from_0() -> None:
    names = layered(layers=[EMBEDDING, {**BLOCK, "repeat": 3}, HEAD]).model.names
    assert names == ("embedding", "block.0", "block.1", "block.2", "head")


def test_a_stage_costs_the_sum_of_its_layers() -> None:
    problem = cut(layered(), 0, 3, 5, 7, 10)
    assert list(problem.costs.forward) == [1 + 2 * 2, 4, 4, 2 * 2 + 5]
    assert list(problem.costs.backward_weight) == [1 + 2 * 1, 2, 2, 2 * 1 + 5]
    assert problem.costs.backward is None
    assert list(problem.memory.forward) == [8, 8, 8, 8]


def test_layers_without_a_fused_backward_count_as_i_plus_w() -> None:
    problem = layered(layers=[EMBEDDING, {**BLOCK, "backward": 2}, HEAD])
    assert list(cut(problem, 0, 3, 5, 7, 10).costs.backward or ()) == [1 + 2 * 2, 4, 4, 2 * 2 + 10]


def test_a_rank_holds_its_layers_and_the_largest_workspace() -> None:
    block = {**BLOCK, "memory": {**BLOCK["memory"], "workspace": 3}}  # type: ignore[dict-item]
    head = {**HEAD, "memory": {"static": 5, "workspace": 2}}
    problem = layered(layers=[EMBEDDING, block, head], memory={"static": [10, 20]})
    assert list(cut(problem, 0, 3, 5, 7, 10).memory.static) == [10 + 2 + 2 + 5 + 3, 20 + 4 + 3]


def test_static_memory_defaults_to_the_parameters() -> None:
    layers = [{**EMBEDDING, "parameters_bytes": 7}, {**BLOCK, "parameters_bytes": 100}, HEAD]
    assert list(cut(layered(layers=layers), 0, 3, 5, 7, 10).memory.static) == [7 + 2 + 2, 4]


def test_transfers_depend_on_the_output_of_the_layer_before_the_cut() -> None:
    layers = [EMBEDDING, {**BLOCK, "output_bytes": 50}, HEAD]
    problem = layered(layers=layers, costs={"link": {"latency": 2, "bandwidth": 25}})
    assert cut(problem, 0, 1, 5, 7, 10).costs.p2p == (6, 4, 4)


def test_an_empty_stage_costs_nothing_and_forwards_its_input() -> None:
    problem = layered(costs={"link": {"latency": 0, "bandwidth": 10}}, cut={"allow_empty": True})
    found = cut(problem, 0, 3, 3, 7, 10)
    assert (found.costs.forward[1], found.memory.forward[1]) == (0, 0)
    assert list(found.costs.p2p) == [10, 10, 10]


def test_a_recomputed_stage_has_the_recomputed_costs_of_its_layers() -> None:
    layers = [EMBEDDING, {**BLOCK, "recompute": RECOMPUTE}, HEAD]
    found = cut(layered(layers=layers), 0, 3, 5, 7, 10, recompute=(True, False, False, False))
    assert list(found.costs.backward_input) == [0 + 2 * 4, 4, 4, 2 * 2 + 5]
    assert list(found.memory.forward) == [2, 8, 8, 8]
    assert list(found.memory.static) == [4 + 2, 4]


def test_absent_keys_of_recompute_keep_the_layer_s_values() -> None:
    again = {"backward_input": 4}
    problem = layered(layers=[EMBEDDING, {**BLOCK, "backward": 2.5, "recompute": again}, HEAD])
    found = problem.model.layers[1].recompute
    assert found is not None
    assert (found.forward, found.backward_weight, found.memory.forward) == (2, 1, 4)
    assert found.backward == 4.5  # plus the increase of I and W


@settings(max_examples=30)
@given(layered_problems(most_layers=4, placements=("v", "loop", "single")))
def test_documents_round_trip(problem: LayeredProblem) -> None:
    written = layered_json(problem)
    assert layered_json(parse_any_problem(written)) == written  # type: ignore[arg-type]
    for found in every_cut(problem, problem.placements[0]):
        normalised = problem_json(found)
        assert problem_json(parse_problem(normalised)) == normalised
        break


def test_a_partition_makes_a_problem_by_stages() -> None:
    partition = [["embedding", "block.0"], ["block.1"], ["block.2"], [f"block.{k}" for k in range(3, 8)]]
    partition[-1].append("head")
    problem = parse_any_problem(document(partition=partition))
    assert isinstance(problem, Problem)
    assert list(problem.costs.forward) == [3, 2, 2, 15]
    assert problem.model is not None
    assert [list(names) for names in problem.model.partition] == partition


def test_stated_costs_of_stages_must_agree_with_their_layers() -> None:
    written = problem_json(cut(layered(), 0, 3, 5, 7, 10))
    written["costs"]["forward"][2] += 1
    with pytest.raises(InvalidInput, match="the layers of the partition give") as caught:
        parse_problem(written)
    assert [issue.pointer for issue in caught.value.issues] == ["/costs/forward"]


@pytest.mark.parametrize(
    ("partition", "pointer"),
    [
        ([["embedding"], ["block.1"], ["block.2"], ["head"]], "/partition/1/0"),
        ([["embedding"], ["block.0"], ["block.1"], ["block.2"]], "/partition"),
        ([["embedding", *(f"block.{k}" for k in range(8)), "head"]], "/partition"),
    ],
)
def test_a_partition_must_list_all_layers_in_order_and_every_stage(
    partition: list[list[str]], pointer: str
) -> None:
    assert set(issues(partition=partition)) == {pointer}


@pytest.mark.parametrize(
    ("changes", "pointer", "detail"),
    [
        ({"layers": []}, "/layers", "at least one"),
        ({"layers": [BLOCK, {**BLOCK, "repeat": 2}]}, "/layers/1/name", "found 'block.0' twice"),
        ({"layers": [{**BLOCK, "repeat": 1000}]}, "/layers", "at most 512"),
        ({"layers": [{**BLOCK, "forward": -1}]}, "/layers/0/forward", "must not be negative"),
        ({"layers": [{**BLOCK, "memory": {"forward": 1}}]}, "/layers/0/memory", "the deltas sum to 1"),
        (
            {"layers": [{**BLOCK, "recompute": {"memory": {"forward": 2}}}]},
            "/layers/0/recompute/memory",
            "must be 0",
        ),
        (
            {"layers": [{"name": "a", "forward": 1, "backward_input": 1}]},
            "/layers/0/backward_weight",
            "required",
        ),
        ({"layers": [HEAD]}, "/layers", "found 1 separable layers for 4 stages"),
        ({"cut": {"together": [["embedding", "nose"]]}}, "/cut/together/0", "'nose', which is not a layer"),
        ({"cut": {"first": 11}}, "/cut/first", "must be at most the model's 8 transformer layers"),
        (
            {"cut": {"first": 0, "together": [["embedding", "block.0"]]}},
            "/cut/first",
            "separates layers that cut.together keeps",
        ),
        ({"cut": {"first": 8}}, "/layers", "every stage needs at least one"),
        ({"costs": {"p2p": [1, 2, 3]}}, "/costs/p2p", "found a list"),
        ({"costs": {"forward": 3}}, "/costs/forward", "found together with layers, which determine it"),
        ({"costs": {"p2p": 1, "link": {"bandwidth": 3}}}, "/costs", "found both p2p and link"),
        ({"costs": {"link": {"bandwidth": 0}}}, "/costs/link/bandwidth", "must be positive"),
        ({"memory": {"limit": [1, 2, 3]}}, "/memory/limit", "found 3 values"),
        ({"memory": {"limit": -1}}, "/memory/limit", "must not be negative"),
        ({"recompute": [True]}, "/recompute", "without a partition"),
        ({"placement": "w"}, "/placement", "found 'w'"),
        ({"chunks": 3}, "/chunks", "placement v has 2 per rank"),
        ({"placement": "auto", "chunks": 2}, "/chunks", "placement auto chooses the number of chunks"),
        ({"pp_degree": 1000, "layers": [{**BLOCK, "repeat": 512}]}, "/layers", "2000 stages"),
    ],
)
def test_an_invalid_document_is_refused_at_the_broken_key(
    changes: dict[str, Any], pointer: str, detail: str
) -> None:
    found = issues(**changes)
    assert set(found) == {pointer}
    assert detail in found[pointer]


@pytest.mark.parametrize(("placement", "chunks"), [("v", 2), ("single", 1), ("loop", 3)])
def test_chunks_may_be_stated_if_they_agree_with_the_placement(placement: str, chunks: int) -> None:
    (found,) = layered(placement=placement, chunks=chunks).placements
    assert (found.kind, found.chunks) == (placement, chunks)


def test_auto_skips_placements_with_more_stages_than_layers() -> None:
    kinds = [(each.kind, each.chunks) for each in layered(placement="auto", pp_degree=4).placements]
    assert kinds == [("v", 2), ("loop", 2), ("single", 1)]


def test_the_example_in_the_documentation_is_valid() -> None:
    text = (ROOT / "docs/formats.md").read_text(encoding="utf-8")
    example = text.partition("## Layers")[2].partition("```json")[2].partition("```")[0]
    problem = parse_any_problem(json.loads(example))
    assert isinstance(problem, LayeredProblem)
    assert {placement.kind for placement in problem.placements} == {"v", "loop", "single"}
