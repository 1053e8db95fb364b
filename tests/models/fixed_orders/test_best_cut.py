"""The best cut for a fixed order: equal to enumeration on small models, and never worse than known cuts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, combinations_with_replacement, pairwise, product
from math import inf, isclose
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.executor_layers import PUBLISHED, layer, layered
from support.titan_configuration import configured
from zbv_models.fixed_orders import executor_cut as executor_cut_module
from zbv_models.fixed_orders.best_cut import Recompute, best_cut
from zbv_models.fixed_orders.executor_cut import (
    ExecutorCut,
    cut_for_executor,
    executor_cut_json,
)
from zbv_models.fixed_orders.megatron_layout import parse_layout
from zbv_models.fixed_orders.regular_cut import TOLERANCE
from zbv_models.fixed_orders.schedules import Schedule, megatron_schedule, torch_schedule
from zbv_solver.errors import InfeasibleMemory, InvalidInput
from zbv_solver.export.torchtitan import module_names
from zbv_solver.partition.modules import Modules
from zbv_solver.partition.runs import First
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.layer import Layer, Model
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.problem import objective_value
from zbv_solver.search.assemble import make_plan
from zbv_solver.timing.start_times import evaluate


def random_layers(random: Random, unit: float) -> LayeredProblem:
    """Four to seven layers of three kinds; ``unit`` scales all numbers."""

    def number(low: int, high: int) -> float:
        return random.randint(low, high) * unit

    def layer() -> dict[str, Any]:
        held = number(1, 4)
        kept = random.choice([-held, -held / 2, 0.0, held / 4])
        memory = {"forward": held, "backward_input": kept, "backward_weight": -held - kept}
        inputs = number(1, 4)
        made: dict[str, Any] = {
            "forward": number(0, 4),
            "backward_input": inputs,
            "backward_weight": number(0, 3),
            "memory": {**memory, "static": number(0, 2), "workspace": number(0, 2)},
            "output_bytes": number(0, 5),
            "recompute": {
                "backward_input": inputs + number(1, 2),
                "memory": {"forward": held / 4, "backward_input": 0, "backward_weight": -held / 4},
            },
        }
        return made | ({"backward": number(1, 6)} if random.random() < 0.5 else {})

    kinds = [layer() for _ in range(3)]
    count = random.randint(4, 7)
    return layered(
        random.choice([1, 2, 3]),
        random.choice([3, 4, 6]),
        [{**random.choice(kinds), "name": f"l{at}"} for at in range(count)],
        objective=random.choice(["span", "makespan"]),
        costs={"link": {"latency": number(0, 2), "bandwidth": 2}},
        memory={"limit": random.choice([None, number(20, 70)])},
    )


def all_values(
    problem: LayeredProblem, schedule: Schedule, recompute: Recompute | First, allow_empty: bool
) -> Iterator[float]:
    """The objectives of all cuts that fit."""
    if isinstance(recompute, First):
        yield from values_of_first(problem, schedule, recompute, allow_empty)
        return
    placement, n = schedule.placement, problem.model.n_layers
    none, every = (False,) * placement.n_stages, (True,) * placement.n_stages
    chosen = {
        "none": [none],
        "all": [every],
        "uniform": [none, every],
        "per-stage": list(product((False, True), repeat=placement.n_stages)),
    }[recompute]
    for inner in combinations_with_replacement(range(1, n), placement.n_stages - 1):
        yield from values_at(problem, schedule, (0, *inner, n), chosen, allow_empty)


def values_at(
    problem: LayeredProblem,
    schedule: Schedule,
    bounds: tuple[int, ...],
    chosen: list[tuple[bool, ...]],
    allow_empty: bool,
) -> Iterator[float]:
    """The objectives of a cut with every choice of recomputed stages, as far as it fits."""
    placement = schedule.placement
    chunks = placement.chunks if placement.kind == "loop" else None
    rules = replace(problem.rules, allow_empty=True)
    blocking = schedule.blocking
    placed = replace(problem, placement=placement.kind, chunks=chunks, rules=rules, blocking=blocking)
    if not allow_empty and any(begin == end for begin, end in pairwise(bounds)):
        return
    for stages in chosen:
        cut = placed.cut_into(placement, Cut.at(bounds, stages))
        limits = cut.memory.limit or (inf,) * placement.pp_degree
        free = replace(cut, memory=replace(cut.memory, limit=None))
        timing = evaluate(free, schedule.orders())
        if all(need <= most * (1 + 1e-9) for need, most in zip(timing.peak_memory, limits, strict=True)):
            yield objective_value(problem.objective, timing)


def values_of_first(
    problem: LayeredProblem, schedule: Schedule, first: First, allow_empty: bool
) -> Iterator[float]:
    """The objectives of all cuts with all numbers of first layers; all layers, too, if any are allowed."""
    n = problem.model.n_layers
    for inner in combinations_with_replacement(range(1, n), schedule.placement.n_stages - 1):
        bounds = (0, *inner, n)
        for count in range(first.least, min(first.most, n) + 1):
            layers: list[Layer] = []
            for begin, end in pairwise(bounds):
                left = count
                for one in problem.model.each[begin:end]:
                    is_able = one.recompute is not None and one.name not in first.others
                    again = one.recompute if is_able and left > 0 else None
                    left -= is_able
                    layers.append(replace(one, costs=again or one.costs, recompute=None))
            same, none = replace(problem, model=Model(tuple(layers))), (False,) * schedule.placement.n_stages
            yield from values_at(same, schedule, bounds, [none], allow_empty)
    if first == First(others=first.others):
        yield from all_values(problem, schedule, "all", allow_empty)


@settings(max_examples=15, deadline=None)
@given(
    st.randoms(use_true_random=True),
    st.sampled_from(["none", "uniform", "per-stage", First(), First(2, 2), First(others=frozenset({"l1"}))]),
    st.booleans(),
    st.sampled_from([1.0, 1 / 3, 123_456.7, 1e-6]),
)
def test_equal_to_enumeration(
    random: Random, recompute: Recompute | First, allow_empty: bool, unit: float
) -> None:
    problem = random_layers(random, unit)
    p, m = problem.pp_degree, problem.microbatches
    offered = [torch_schedule("GPipe", p, m), torch_schedule("1F1B", p, m)]
    offered += [torch_schedule("ZBVZeroBubble", p, m)] if 2 * p <= 4 else []
    offered += [megatron_schedule(p, m, 1)]
    offered += [megatron_schedule(p, m, 2)] if p == 2 and m % 2 == 0 else []
    tried = random.sample(offered, 2)
    best = {
        schedule: min(all_values(problem, schedule, recompute, allow_empty), default=inf)
        for schedule in tried
    }
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


def model_of(sizes: Sequence[int], has_mtp: bool, ranks: int) -> LayeredProblem:
    """A mixture of experts: three dense layers, then equal blocks; the loss is about as long as a block."""

    def timed(name: str, time: float, held: float, **more: Any) -> dict[str, Any]:
        return layer(name, time, 2 * time, 0, held=held, **more)

    layers = [
        timed("embedding", 0.1, 1),
        timed("dense", 1.25, 3, repeat=3),
        timed("block", 1, 4, repeat=sum(sizes) - 3),
        *([timed("mtp", 1.3, 4)] if has_mtp else []),
        timed("head", 0.8, 2),
    ]
    return layered(ranks, 2 * ranks, layers, 0.05)


def seeing_model() -> LayeredProblem:
    """A vision encoder in front, as estimates name its layers."""
    names = ("patches", "vision", "projector", "embedding", "block", "head")
    copies = {"vision": 1, "block": 6}
    layers = [layer(name, 1, **({"repeat": copies[name]} if name in copies else {})) for name in names]
    return layered(2, 4, layers, 0.05)


@pytest.mark.parametrize(
    "name",
    ["dsv3-proxy-14L-pp4", "moe16L-pp2-selrecompute", "glm52-gb200-pp6-128k", "dsv3-map-pp8vp1", "zb-1.5B"],
)
def test_not_worse_than_published_layouts(name: str) -> None:
    published = next(each for each in PUBLISHED if each["id"] == name)
    sizes, ranks = published["decoder_layers_per_stage"], published["pp"]
    has_mtp = published.get("mtp_stage") is not None
    problem = model_of(sizes, has_mtp, ranks)
    schedule = megatron_schedule(ranks, problem.microbatches, len(sizes) // ranks)
    inner = list(accumulate(sizes))[:-1]
    bounds = (0, *(1 + bound for bound in inner), problem.model.n_layers)
    chunks = schedule.placement.chunks if schedule.placement.kind == "loop" else None
    placed = replace(
        problem,
        placement=schedule.placement.kind,
        chunks=chunks,
        rules=replace(problem.rules, allow_empty=True),
        blocking=schedule.blocking,
    )
    theirs = evaluate(placed.cut_into(schedule.placement, Cut.at(bounds)), schedule.orders()).span
    found = best_cut(problem, [schedule], allow_empty=True, effort="quick")
    assert found.lower_bound <= found.least <= min(theirs, found.even) * (1 + 1e-9)
    # Given as a start, their cut is never lost, with any budget.
    given = best_cut(problem, [schedule], allow_empty=True, also=[bounds], effort="quick")
    assert given.least <= theirs * (1 + 1e-9)


def recomputable(layer: dict[str, Any]) -> dict[str, Any]:
    """A layer that, recomputed, takes another forward and holds a quarter."""
    held = layer["memory"]["forward"] / 4
    memory = {"forward": held, "backward_input": -held, "backward_weight": 0, "workspace": 3 * held}
    again = {"backward_input": layer["backward_input"] + layer["forward"], "memory": memory}
    return {**layer, "recompute": again}


def blocks(limit: float, has_mtp: bool = True, **more: Any) -> LayeredProblem:
    """Eight blocks and a module of multi-token prediction on two ranks with little memory."""
    layers = [
        layer("embedding", 0, held=4),
        recomputable(layer("block", 1, 2, 0, held=4, repeat=8)),
        *([recomputable(layer("mtp", 1, 2, 0, held=4))] if has_mtp else []),
        layer("head", 1, 2, 0, held=4),
    ]
    return layered(2, 4, layers, memory={"limit": limit}, **more)


def flags_of(found: ExecutorCut) -> dict[str, str]:
    assert found.settings is not None
    lines = (line.strip(" \\").partition(" ") for line in found.settings.splitlines())
    return {name: value for name, _, value in lines}


def test_megatron_recomputes_as_many_first_layers_of_every_stage_as_memory_asks_for() -> None:
    counts = {}
    for limit in (60.0, 38.0, 36.0, 31.0):
        found = cut_for_executor(blocks(limit), "megatron", virtual_stages=[1], effort="quick")
        best, flags = found.best.results[0], flags_of(found)
        counts[limit] = best.recompute_layers
        document = executor_cut_json(found)
        assert (document["recompute"], document["recompute_layers"]) == (
            best.recompute,
            best.recompute_layers,
        )
        assert flags.get("--recompute-num-layers") == (best.recompute_layers and str(best.recompute_layers))
        assert flags.get("--recompute-method") == (best.recompute_layers and "block")
        # The plan has the costs that were counted: of the first blocks of a stage, and never of MTP layers.
        model = found.best.problem.model
        assert model is not None
        for begin, end in pairwise(model.cut.bounds):
            stage = [each for each in model.model.each[begin:end] if each.name.startswith("block")]
            held = [each.costs.memory.forward for each in stage]
            again = min(best.recompute_layers or 0, len(held))
            assert held == [1.0] * again + [4.0] * (len(held) - again)
        assert model.model.each[-2].costs.memory.forward == 4
        make_plan(found.best.problem, found.best.orders, method="test")
    given = [count or 0 for count in counts.values()]
    assert given == [0, 1, 3, 4]


def test_the_number_of_recomputed_layers_can_be_fixed() -> None:
    found = cut_for_executor(
        blocks(1000.0), "megatron", virtual_stages=[1], recompute_layers=2, effort="quick"
    )
    flags = flags_of(found)
    assert (flags["--recompute-method"], flags["--recompute-num-layers"]) == ("block", "2")
    free = cut_for_executor(blocks(1000.0), "megatron", virtual_stages=[1], effort="quick")
    assert found.best.objective > free.best.objective
    for change, message in (
        ({"executor": "torch"}, "found 2 and executor torch; only Megatron-LM does that"),
        ({"recompute": "none"}, "found 2 and --recompute none"),
        ({"recompute_layers": 0}, "found 0; must be at least 1"),
    ):
        asked = {"executor": "megatron", "recompute_layers": 2, **change}
        with pytest.raises(InvalidInput, match=message):
            cut_for_executor(blocks(1000.0), **asked)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="every transformer layer needs recompute"):
        cut_for_executor(model_of([3, 3], False, 2), "megatron", recompute_layers=1)


def test_recomputed_modules_of_a_document_are_megatrons_selective_recomputation() -> None:
    problem = blocks(20.0, recompute_modules=["mlp", "layernorm"])
    flags = flags_of(cut_for_executor(problem, "megatron", virtual_stages=[1], effort="quick"))
    assert flags["--recompute-granularity"] == "selective"
    assert "--recompute-method" not in flags
    # torchtitan recomputes whole layers, or operations that it chooses.
    with pytest.raises(InvalidInput, match="found mlp, layernorm; only Megatron-LM does that"):
        cut_for_executor(problem, "torch", recompute="all")
    with pytest.raises(InfeasibleMemory):
        cut_for_executor(problem, "torch", virtual_stages=[1], effort="quick")


def test_recomputed_operations_are_torchtitans_selective_recomputation() -> None:
    problem = blocks(20.0, has_mtp=False, recompute_modules=["op"])
    found = cut_for_executor(problem, "torchtitan", virtual_stages=[1], effort="quick")
    assert found.best.results[0].recompute == "all"
    assert "activation_checkpoint = SelectiveAC.Config()" in (found.settings or "")
    with pytest.raises(InvalidInput, match="found op; only torchtitan does that"):
        cut_for_executor(problem, "megatron", recompute="all")


@pytest.mark.parametrize("executor", ["torch", "torchtitan"])
def test_nothing_is_recomputed_with_split_backwards_of_pytorch(executor: str) -> None:
    """PyTorch would compute a stage again in I and for every gradient of W, which no cost has."""
    problem = blocks(1000.0, has_mtp=False, placement="v")
    found = cut_for_executor(problem, executor, schedules=["ZBVZeroBubble"], effort="quick")
    assert {each.recompute for each in found.best.results} == {"none"}
    with pytest.raises(InvalidInput, match="computes a recomputed stage again in I and for every gradient"):
        cut_for_executor(problem, executor, schedules=["ZBVZeroBubble"], recompute="all")


def test_megatrons_flags_are_of_the_cut() -> None:
    problem = model_of([3, 6], True, 2)
    found = cut_for_executor(problem, "megatron", virtual_stages=[2], effort="quick")
    assert found.settings is not None
    words = shlex.split(found.settings.replace("\\\n", " "))
    flags = dict(zip(words[::2], words[1::2], strict=True))
    stages = parse_layout(flags["--pipeline-model-parallel-layout"])
    model = found.best.problem.model
    assert model is not None
    assert Modules.of(problem.model).bounds(stages) == model.cut.bounds
    assert flags["--num-layers"] == "9"
    assert int(flags["--microbatch-group-size-per-virtual-pipeline-stage"]) == found.best.schedule.group
    # MTP layers must be on the last virtual stage of their rank.
    assert "m" in "".join(stages[2:])
    assert json.loads(json.dumps(executor_cut_json(found)))["layers_per_stage"] == [
        len(stage) for stage in model.partition
    ]


def test_torchtitans_settings_are_of_the_cut() -> None:
    problem = model_of([3, 6], False, 2)
    found = cut_for_executor(problem, "torchtitan", effort="quick")
    assert found.settings is not None
    assert found.stages is not None
    own, schedule = configured(found.settings, "newer").parallelism, found.best.schedule
    assert own.module_fqns_per_model_part == module_names(found.stages)
    assert (own.pipeline_parallel_schedule, own.num_pp_microbatches) == (schedule.name, schedule.microbatches)
    assert found.best.orders == schedule.orders()


def test_pytorch_has_no_settings_of_a_cut() -> None:
    found = cut_for_executor(model_of([3, 3], True, 2), "torch", virtual_stages=[1], effort="quick")
    assert found.settings is None
    assert "no settings of a cut" in found.remark


def test_layers_that_an_executor_cannot_run_are_refused_before_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executor_cut_module, "best_cut", lambda *_, **__: pytest.fail("searched"))
    with pytest.raises(
        InvalidInput, match="found 'mtp', which belongs to multi-token prediction; torchtitan"
    ):
        cut_for_executor(model_of([3, 3], True, 2), "torchtitan")


def test_torchtitan_trains_multi_token_prediction_without_a_pipeline() -> None:
    found = cut_for_executor(model_of([3, 3], True, 1), "torchtitan", virtual_stages=[1], effort="quick")
    assert found.settings is not None
    assert configured(found.settings, "newer").parallelism.module_fqns_per_model_part is None


def test_a_vision_encoder_stays_with_the_embedding() -> None:
    """However long its layers take: torchtitan and Megatron-Bridge run it in the first stage."""
    settings = cut_for_executor(seeing_model(), "megatron", effort="quick").settings
    assert settings is not None
    assert '-layout "E' in settings
    assert "v" not in settings.split('"')[1]
    found = cut_for_executor(seeing_model(), "torchtitan", effort="quick")
    assert found.stages is not None
    assert found.stages[0].startswith("vvvE")
    assert "v" not in "".join(found.stages[1:])
    assert found.settings is not None
    parts = configured(found.settings, "0.3.0").parallelism.module_fqns_per_model_part
    assert [part.count("vision_encoder") for part in parts] == [1] + [0] * (len(parts) - 1)


def test_impossible_requests_are_refused() -> None:
    problem = model_of([3, 3], False, 2)
    with pytest.raises(InvalidInput, match="must be one of megatron"):
        cut_for_executor(problem, "deepspeed")
    with pytest.raises(InvalidInput, match="fewer virtual stages or fewer ranks"):
        cut_for_executor(problem, "torch", virtual_stages=[9])
    with pytest.raises(InvalidInput, match="a schedule for 4 ranks"):
        best_cut(problem, [megatron_schedule(4, 4, 1)])


def test_the_error_of_too_little_memory_names_the_closest_cut() -> None:
    problem = replace(model_of([3, 3], False, 2), limit=(9.0, 9.0))
    with pytest.raises(InfeasibleMemory, match="closest cut") as raised:
        best_cut(problem, [megatron_schedule(2, 4, 1)], effort="quick")
    assert raised.value.is_proved
    fits = replace(problem, limit=raised.value.smallest)
    assert best_cut(fits, [megatron_schedule(2, 4, 1)], effort="quick").objective > 0
