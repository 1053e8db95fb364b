"""The best cut for a fixed order: equal to enumeration on small models, and the settings that ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, combinations_with_replacement, pairwise, product
from math import inf, isclose
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.executor_layers import Document, flags_of, layer, layered
from support.titan_configuration import configured
from zbv_models.fixed_orders.best_cut import Recompute, best_cut, free_plan, improved_plan
from zbv_models.fixed_orders.executor_cut import ExecutorCut, cut_for_executor, executor_cut_json
from zbv_models.fixed_orders.regular_cut import TOLERANCE
from zbv_models.fixed_orders.schedules import Schedule, megatron_schedule, torch_schedule
from zbv_solver.errors import InfeasibleMemory, InvalidInput
from zbv_solver.export.torchtitan import module_names
from zbv_solver.partition.runs import First
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.layer import Model
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.problem import objective_value
from zbv_solver.search.assemble import make_plan
from zbv_solver.search.options import PHASES, SearchOptions
from zbv_solver.timing.start_times import evaluate


def random_layers(random: Random, unit: float) -> LayeredProblem:
    """Four to seven layers of three kinds; ``unit`` scales all numbers."""

    def number(low: int, high: int) -> float:
        return random.randint(low, high) * unit

    def kind() -> Document:
        held = number(1, 4)
        kept = random.choice([-held, -held / 2, 0.0, held / 4])
        memory = {"forward": held, "backward_input": kept, "backward_weight": -held - kept}
        inputs = number(1, 4)
        again = {"forward": held / 4, "backward_input": 0, "backward_weight": -held / 4}
        made = layer("", number(0, 4), inputs, number(0, 3), output_bytes=number(0, 5))
        made |= {"memory": {**memory, "static": number(0, 2), "workspace": number(0, 2)}}
        made |= {"recompute": {"backward_input": inputs + number(1, 2), "memory": again}}
        return made | ({"backward": number(1, 6)} if random.random() < 0.5 else {})

    kinds = [kind() for _ in range(3)]
    return layered(
        random.choice([1, 2, 3]),
        random.choice([3, 4, 6]),
        [{**random.choice(kinds), "name": f"l{at}"} for at in range(random.randint(4, 7))],
        objective=random.choice(["span", "makespan"]),
        costs={"link": {"latency": number(0, 2), "bandwidth": 2}},
        memory={"limit": random.choice([None, number(20, 70)])},
        cut={"allow_empty": random.choice([None, None, False])},
    )


def all_values(
    problem: LayeredProblem, schedule: Schedule, recompute: Recompute | First, allow_empty: bool
) -> Iterator[float]:
    """The objectives of all cuts that fit, with every choice of recomputed stages."""
    placement, n = schedule.placement, problem.model.n_layers
    none, every = ((again,) * placement.n_stages for again in (False, True))
    choices = {"none": [none], "uniform": [none, every]}
    choices["per-stage"] = list(product((False, True), repeat=placement.n_stages))
    may_be_empty = allow_empty and problem.rules.allow_empty is not False
    chosen = combinations_with_replacement if may_be_empty else combinations
    inner = chosen(range(1, n), placement.n_stages - 1)
    for bounds in ((0, *middle, n) for middle in inner):
        if isinstance(recompute, First):
            counts = range(recompute.least, min(recompute.most, n) + 1)
            variants = [(first_again(problem, recompute, bounds, count), none) for count in counts]
            # All first layers are all layers.
            variants += [(problem, every)] if recompute == First(others=recompute.others) else []
        else:
            variants = [(problem, stages) for stages in choices[recompute]]
        for layers, stages in variants:
            cut = placed_on(layers, schedule).cut_into(placement, Cut.at(bounds, stages))
            timing = evaluate(replace(cut, memory=replace(cut.memory, limit=None)), schedule.orders())
            if np.all(timing.peak_memory <= np.array(cut.memory.limit or inf) * (1 + 1e-9)):
                yield objective_value(problem.objective, timing)


def placed_on(problem: LayeredProblem, schedule: Schedule) -> LayeredProblem:
    placement, rules = schedule.placement, replace(problem.rules, allow_empty=True)
    chunks = placement.chunks if placement.kind == "loop" else None
    placed = replace(problem, placement=placement.kind, chunks=chunks, blocking=schedule.blocking)
    return replace(placed, rules=rules)


def first_again(problem: LayeredProblem, first: First, bounds: tuple[int, ...], count: int) -> LayeredProblem:
    """So many first layers of every stage have the costs of their recomputation."""
    layers = list(problem.model.each)
    for begin, end in pairwise(bounds):
        able = [at for at in range(begin, end) if layers[at].name not in first.others]
        for at in able[:count]:
            layers[at] = replace(layers[at], costs=layers[at].recompute or layers[at].costs)
    return replace(problem, model=Model(tuple(replace(one, recompute=None) for one in layers)))


RECOMPUTED = ["none", "uniform", "per-stage", First(), First(2, 2), First(others=frozenset({"l1"}))]
UNITS = [1.0, 1 / 3, 123_456.7, 1e-6]


@settings(max_examples=15, deadline=None)
@given(st.randoms(use_true_random=True), st.sampled_from(RECOMPUTED), st.booleans(), st.sampled_from(UNITS))
def test_best_cuts(random: Random, recompute: Recompute | First, allow_empty: bool, unit: float) -> None:
    problem = random_layers(random, unit)
    p, m = problem.pp_degree, problem.microbatches
    offered = [torch_schedule("GPipe", p, m), torch_schedule("1F1B", p, m), megatron_schedule(p, m, 1)]
    offered += [torch_schedule("ZBVZeroBubble", p, m)] if 2 * p <= 4 else []
    offered += [megatron_schedule(p, m, 2)] if p == 2 and m % 2 == 0 else []
    tried = random.sample(offered, 2)
    best = {each: min(all_values(problem, each, recompute, allow_empty), default=inf) for each in tried}
    try:
        found = best_cut(problem, tried, recompute=recompute, allow_empty=allow_empty, effort="quick")
    except InfeasibleMemory:
        assert min(best.values()) == inf
        return
    assert isclose(found.least, min(best.values()), rel_tol=1e-9)
    assert found.least * (1 - 1e-9) <= found.objective <= found.least * (1 + TOLERANCE) * (1 + 1e-9)
    assert found.lower_bound <= best[found.schedule] * (1 + 1e-9)
    assert found.bound_of_all <= min(best.values()) * (1 + 1e-9)
    assert found.is_optimal
    assert found.even >= found.least * (1 - 1e-9) or problem.limit is not None


def blocks(limit: float, has_mtp: bool = True, ranks: int = 2, **more: Any) -> LayeredProblem:
    """Eight blocks and a module of multi-token prediction on ranks with little memory.

    A recomputed layer takes another forward and holds a quarter.
    """
    memory = {"forward": 1, "backward_input": -1, "backward_weight": 0, "workspace": 3}
    again = {"recompute": {"backward_input": 3, "memory": memory}}
    between = [layer("block", 1, 2, 0, held=4, repeat=8, **again)]
    between += [layer("mtp", 1, 2, 0, held=4, **again)] if has_mtp else []
    layers = [layer("embedding", 0, held=4), *between, layer("head", 1, 2, 0, held=4)]
    return layered(ranks, 4, layers, memory={"limit": limit}, **more)


def alone(problem: LayeredProblem, executor: str, **more: Any) -> ExecutorCut:
    """The best cut with one stage per rank."""
    return cut_for_executor(problem, executor, virtual_stages=[1], effort="quick", **more)


@pytest.mark.parametrize(
    ("limit", "fixed", "count"), [(60, None, None), (38, None, 1), (36, None, 3), (31, None, 4), (1000, 2, 2)]
)
def test_megatron_recomputes_first_layers(limit: float, fixed: int | None, count: int | None) -> None:
    found = alone(blocks(limit), "megatron", recompute_layers=fixed)
    best, flags, document = found.best.results[0], flags_of(found), executor_cut_json(found)
    assert (document["recompute"], document["recompute_layers"]) == (best.recompute, count)
    assert flags.get("--recompute-num-layers") == (count and str(count))
    assert flags.get("--recompute-method") == (count and "block")
    # The plan has the costs that were counted: of the first blocks of a stage, and never of MTP layers.
    model: Any = found.best.problem.model
    for begin, end in pairwise(model.cut.bounds):
        stage = [each for each in model.model.each[begin:end] if each.name.startswith("block")]
        again = min(count or 0, len(stage))
        assert [each.costs.memory.forward for each in stage] == [1.0] * again + [4.0] * (len(stage) - again)
    assert model.model.each[-2].costs.memory.forward == 4
    make_plan(found.best.problem, found.best.orders, method="test")


def test_split_backwards_of_pytorch_recompute_nothing_and_torch_no_modules() -> None:
    with pytest.raises(InfeasibleMemory):
        alone(blocks(20.0, recompute_modules=["mlp", "layernorm"]), "torch")
    problem = blocks(1000.0, has_mtp=False, placement="v")
    split = cut_for_executor(problem, "torch", schedules=["ZBVZeroBubble"], effort="quick")
    assert {each.recompute for each in split.best.results} == {"none"}
    assert (split.settings, "no settings of a cut" in split.remark) == (None, True)


def test_a_vision_encoder_stays_with_the_embedding() -> None:
    """However long its layers take: torchtitan and Megatron-Bridge run it in the first stage."""
    names = ("patches", "vision", "projector", "embedding", *(f"block{at}" for at in range(6)), "head")
    problem = layered(2, 4, [layer(name, 1) for name in names], 0.05)
    flags = flags_of(cut_for_executor(problem, "megatron", effort="quick"))
    layout = flags["--pipeline-model-parallel-layout"]
    assert (layout[0], layout.count("v")) == ("E", 0)
    found = cut_for_executor(problem, "torchtitan", effort="quick")
    parts = configured(found.settings or "", "0.3.0").parallelism.module_fqns_per_model_part
    assert parts == module_names(found.stages or ())
    assert [part.count("vision_encoder") for part in parts] == [1] + [0] * (len(parts) - 1)


def ruled(blocks: int, ranks: int, **cut: Any) -> LayeredProblem:
    layers = [layer("embedding", 1), layer("block", 10, repeat=blocks), layer("head", 12)]
    return layered(ranks, 2 * ranks, layers, cut=cut)


def blocks_of(best: Any) -> list[int]:
    """The transformer layers of every stage."""
    before = best.problem.model.model.blocks_before
    return [before[end] - before[begin] for begin, end in pairwise(best.problem.model.cut.bounds)]


def test_first_and_last_are_transformer_layers_of_ranks() -> None:
    """Megatron-LM divides those of a rank evenly over its virtual stages."""
    one = cut_for_executor(ruled(8, 2, first=3, last=5), "megatron", effort="quick")
    assert (one.stages, one.best.schedule.name) == (("Ettt", "tttttL"), "1F1B")
    # Schedules that cannot keep a rule are named with the reason.
    reasons = {schedule.placement.chunks: issue for schedule, issue in one.best.refused.items()}
    assert [reasons[chunks].pointer for chunks in (2, 3, 4)] == ["/cut/first", "/cut/last", "/cut/first"]
    assert "found 3 transformer layers on the first rank, which has 2 virtual stages" in reasons[2].detail
    two = best_cut(ruled(12, 3, first=2, last=6), [megatron_schedule(3, 6, 2)], effort="quick")
    assert (blocks_of(two)[::3], blocks_of(two)[2::3], two.is_optimal) == ([1, 1], [3, 3], True)
    only = best_cut(ruled(13, 3, last=3), [megatron_schedule(3, 6, 3)], effort="quick")
    assert blocks_of(only)[2::3] == [1, 1, 1]
    # An end rank without transformer layers has one stage if none may be empty.
    for end, at in (("first", 0), ("last", -1)):
        best = cut_for_executor(ruled(6, 4, **{end: 0}), "torch", effort="quick").best
        assert (best.schedule.name, blocks_of(best)[at]) == ("1F1B", 0)
        (issue, *_) = best.refused.values()
        assert issue.pointer == f"/cut/{end}"
        assert f"found 0 transformer layers on the {end} rank, which has 2 virtual stages" in issue.detail
    with pytest.raises(InvalidInput, match="a single one of the stages has all 8 transformer layers"):
        ruled(8, 1, first=3)


TWO, ALL = {"recompute_layers": 2}, {"recompute": "all"}
OP: Document = {"has_mtp": False, "recompute_modules": ["op"]}


@pytest.mark.parametrize(("problem", "executor", "more", "message"), [
    (ruled(8, 2), "deepspeed", {}, "must be one of megatron"),
    # Too few layers, with what the executor can do.
    (ruled(2, 4, allow_empty=False), "megatron", {"virtual_stages": [2]},
     "Give fewer virtual stages or fewer ranks or empty stages (cut.allow_empty) or finer layers."),
    *((problem, "torch", {"virtual_stages": [chunks]},
       "Give fewer virtual stages or fewer ranks or finer layers.")
      for problem, chunks in ((ruled(2, 4), 2), (ruled(1, 4, allow_empty=True), 2), (ruled(8, 2), 9))),
    (ruled(1, 4, allow_empty=True), "torchtitan", {"virtual_stages": [1]},
     "Give fewer ranks or finer layers."),
    # Rules that contradict the model. Megatron-LM#2718: 24 of 48 layers were on no rank, without a word.
    (ruled(48, 2, first=11, last=13), "megatron", {},
     "24 of 48 transformer layers, so 24 of the model's layers"),
    (blocks(1000), "torchtitan", {}, "found 'mtp', which belongs to multi-token prediction; tor"),
    (blocks(9.0), "torch", TWO, "found 2 and executor torch; only Megatron-LM does"),
    (blocks(9.0), "megatron", {**TWO, "recompute": "none"}, "found 2 and --recompute none"),
    (blocks(9.0), "megatron", {"recompute_layers": 0}, "found 0; must be at least 1"),
    (ruled(8, 2), "megatron", TWO, "every transformer layer needs recompute"),
    (blocks(20.0, recompute_modules=["mlp"]), "torch", ALL, "found mlp; only Megatron-LM does that"),
    (blocks(20.0, **OP), "megatron", ALL, "found op; only torchtitan does that"),
    # PyTorch would compute a stage again in I and for every gradient of W, which no cost has.
    (blocks(99.0, has_mtp=False), "torch", {**ALL, "schedules": ["ZBVZeroBubble"]},
     "computes a recomputed stage again in I and for every"),
])  # fmt: skip
def test_impossible_requests(problem: LayeredProblem, executor: str, more: Document, message: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        cut_for_executor(problem, executor, effort="quick", **more)
    assert message in str(raised.value)


def test_schedules_that_do_not_fit_are_refused_with_the_closest_cut() -> None:
    problem, schedule = blocks(19, has_mtp=False), megatron_schedule(2, 4, 1)
    with pytest.raises(InvalidInput, match="a schedule for 2 ranks"):
        best_cut(ruled(8, 4), [schedule])
    for tried in ([schedule], [torch_schedule("GPipe", 2, 4), schedule]):
        with pytest.raises(InfeasibleMemory, match="closest cut") as raised:
            best_cut(problem, tried, effort="quick")
        assert (raised.value.is_proved, raised.value.smallest) == (True, (24, 28)), "those of 1F1B"
    assert best_cut(replace(problem, limit=(24, 28)), [schedule], effort="quick").objective > 0


NO_SEARCH = SearchOptions("quick", without=PHASES)
TIMES = st.one_of(st.just([9, 1, 1, 9]), st.lists(st.integers(1, 9), min_size=4, max_size=7))


@settings(max_examples=6, deadline=None)
@given(TIMES, st.sampled_from([(None, (1, 2)), (9, (1,))]))
def test_a_free_order_is_not_longer(times: list[int], room: tuple[int | None, tuple[int, ...]]) -> None:
    """The executor's order is one of the candidates, also where zbv's own placement does not fit."""
    limit, chunks = room
    layers = [layer(f"l{number}", time, held=9 / len(times)) for number, time in enumerate(times)]
    problem = layered(2, 8, layers, 1, placement="v", memory={"limit": limit})
    best = best_cut(problem, [megatron_schedule(2, 8, each) for each in chunks], effort="quick")
    free, improved = free_plan(problem, best, NO_SEARCH), improved_plan(best, NO_SEARCH)
    for plan in (free, improved):
        assert plan.objective <= best.objective * (1 + 1e-9)
        assert plan.cut is not None
        assert plan.cut.lower_bound <= plan.objective * (1 + 1e-9)
    assert improved.problem.placement == best.problem.placement
    # A free order overlaps transfers with actions, as zbv's runtime does, unless the problem says otherwise.
    assert (not any(best.problem.costs.p2p)) == best.schedule.blocking
    assert all(improved.problem.costs.p2p)
    same = improved_plan(best, None, is_blocking=best.schedule.blocking)
    assert same.orders == best.orders
    assert same.objective == pytest.approx(best.objective)
