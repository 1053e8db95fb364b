"""A profile of layers is a problem that leaves the partition to the planner."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.functions import Adapted
from support.nested_model import NestedModel
from support.selfcheck import hard_model
from support.thread_transport import ThreadHub
from torch import nn
from zbv_models.layouts.profile import parse_profile
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.reading import parse_any_problem
from zbv_worker.commands.cli import main
from zbv_worker.measure.estimate.estimate import estimate_layers
from zbv_worker.measure.profile import profile
from zbv_worker.measure.profile.captured import Captured, capture, split_into_layers
from zbv_worker.measure.profile.layers import as_kinds, to_layered_document
from zbv_worker.measure.profile.profile import (
    LayerProfile,
    LinkProfile,
    LinkSample,
    ProfileOptions,
    RankProfile,
    ReductionProfile,
    Spread,
    StageProfile,
    rank_json,
    read_rank,
)
from zbv_worker.measure.profile.rank import RankProfiler
from zbv_worker.measure.stage_memory import StaticBytes, stage_memory
from zbv_worker.model.spec import ModelSpec
from zbv_worker.models.gpt import GPT, Block, GptConfig, gpt
from zbv_worker.stage.program import Program
from zbv_worker.stage.recorder import SplitShare
from zbv_worker.stage.stage import Stage
from zbv_worker.values.structure import bytes_of

CPU = torch.device("cpu")
MODEL = {"layers": 3, "width": 32, "heads": 2, "length": 32, "sequences": 2, "characters": 20_000}
PROFILE = ["profile", "--model", "zbv_worker.models.gpt:gpt", "--model-args", json.dumps(MODEL)]
P = 2


# --- a real model


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_layers_with_nested_values_are_measured_and_estimated_alike(*, is_recomputed: bool) -> None:
    model = NestedModel()
    data, names = model.microbatch(0, 0), model.layer_names()
    stage = Stage(0, 1, model.build_layers(names, CPU), 1, model.loss)
    release = capture(stage)
    stage.forward(0, data.input, data.target, split=False, keywords=data.keywords)
    stage.backward(0, None)
    found = split_into_layers(release(), model, 0, len(names), is_recomputed=is_recomputed)
    estimates = list(estimate_layers(model))
    for (at, each), estimate in zip(found.items(), estimates, strict=True):
        given = each.input, each.target, each.gradient
        measured = stage_memory(each.stage, *given, CPU, each.keywords)
        walked: Any = estimate.recomputed if is_recomputed else estimate.kept
        if is_recomputed:  # without a graph, more tensors count as inputs with a gradient than in an estimate
            measured = replace(measured, workspace=walked.memory.workspace)
        assert measured == walked.memory, names[at]
        assert estimate.output_bytes == bytes_of(each.output)


def test_a_profile_measures_and_records_the_program_that_will_run(tmp_path: Path) -> None:
    numbers = ["--pp", "1", "--microbatches", "2", "--repeats", "1", "--timeout", "60"]
    program = ["--precision", "bfloat16", "--no-main-gradients"]
    assert main([*PROFILE, *numbers, *program, "-o", str(tmp_path / "problem.json")]) == 0
    problem: Any = parse_any_problem(json.loads((tmp_path / "problem.json").read_text()))
    assert dict(problem.measured) == Program("bfloat16", has_main_gradients=False).described(CPU)
    estimates = list(estimate_layers(gpt(**MODEL), Program("bfloat16")))
    plain = list(estimate_layers(gpt(**MODEL)))
    held = [layer.costs.memory.forward for layer in problem.model.each]
    assert held == [estimate.kept.memory.after_forward for estimate in estimates]
    assert held[1] < plain[1].kept.memory.after_forward


class Finetuned(GPT):
    """Embedding and first block are frozen; the second one has an adapter, and the head is frozen above."""

    def build_layers(self, names: Sequence[str], device: torch.device) -> nn.Sequential:
        layers = super().build_layers(names, device)
        for name, layer in zip(names, layers, strict=True):
            if name != "block.2":
                layer.requires_grad_(False)
            if name == "block.1" and isinstance(layer, Block):
                setattr(layer, "expand", Adapted(layer.expand, 4))  # noqa: B010 - its type is another
        return layers


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_frozen_layers_are_measured_without_what_they_do_not_compute(*, is_recomputed: bool) -> None:
    sizes: dict[str, Any] = MODEL
    model = Finetuned(GptConfig(**sizes), seed=0)
    options = ProfileOptions(
        ModelSpec("a:b"), P, microbatches=2, repeats=1, by_layer=True, recompute=is_recomputed
    )
    ranks = ThreadHub(P).run(lambda transport: RankProfiler(options, transport, CPU, model).measure())
    layers = [layer for rank in ranks for layer in rank.layers]
    estimates = list(estimate_layers(model))
    for layer, estimate in zip(layers, estimates, strict=True):
        assert layer.static == estimate.static
        assert layer.kept.memory == replace(estimate.kept.memory, workspace=layer.kept.workspace), layer.name
    found = {layer.name: layer for layer in layers}
    flops = {estimate.name: estimate.kept.flops for estimate in estimates}
    for name in ("embedding", "block.0"):
        assert (found[name].kept.held_after_forward, found[name].kept.held_after_input) == (0, 0)
        assert (flops[name].backward_input, flops[name].backward_weight) == (0, 0)
        times, _ = found[name].kept.costs
        assert times["backward_weight"] == 0
    adapter = 4 * (32 + 128)
    assert found["block.1"].static.gradients == 4 * adapter
    tokens = 2 * 32
    assert flops["block.1"].backward_weight == 2 * tokens * adapter
    assert flops["block.2"].backward_weight == 2 * tokens * 12 * 32**2
    assert flops["head"].backward_weight == 0 < flops["head"].backward_input
    assert found["head"].kept.split is None
    static = found["head"].static
    assert static.gradients == static.optimizer == 0 < static.parameters


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of a model by two ranks, with and without recomputation."""
    folder = tmp_path_factory.mktemp("profile")
    numbers = ["--pp", str(P), "--microbatches", "6", "--repeats", "2", "--timeout", "60", "--recompute"]
    outputs = ["--report", str(folder / "report.json"), "-o", str(folder / "problem.json")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, "LEAST_WEIGHT_SHARE", 0.0)  # a busy machine may hide how long W takes
        assert main([*PROFILE, *numbers, *outputs, "--memory-limit-fraction", "0.5"]) == 0
    return folder


@pytest.fixture(scope="module")
def problem(written: Path) -> Any:
    return parse_any_problem(json.loads((written / "problem.json").read_text()))


def test_the_problem_has_the_models_layers_without_a_partition(problem: LayeredProblem) -> None:
    assert list(problem.model.names) == ["embedding", "block.0", "block.1", "block.2", "head"]
    assert (problem.pp_degree, problem.microbatches, problem.placement) == (P, 6, "auto")
    assert (problem.units.time, problem.units.memory) == ("us", "bytes")


def test_every_layer_is_measured_with_and_without_recomputation(problem: LayeredProblem) -> None:
    for layer in problem.model.each:
        assert layer.recompute is not None
        for costs in (layer.costs, layer.recompute):
            assert costs.backward is not None
            assert min(costs.forward, costs.backward) > 0
            assert costs.forward < 1e6  # us
    _, block, *_ = problem.model.each
    assert block.recompute is not None
    assert block.costs.backward_weight > 0
    # Times of so small a block are too noisy to be compared; its memory shows that it is recomputed.
    assert block.recompute.memory.forward < block.costs.memory.forward


def test_memory_equals_the_estimate_to_the_byte(problem: LayeredProblem) -> None:
    for layer, estimate in zip(problem.model.each, estimate_layers(gpt(**MODEL)), strict=True):
        assert layer.parameters_bytes == estimate.static.parameters
        assert layer.output_bytes == estimate.output_bytes
        assert layer.recompute is not None
        assert estimate.recomputed is not None
        for costs, walked in ((layer.costs, estimate.kept), (layer.recompute, estimate.recomputed)):
            assert costs.memory.static == estimate.static.total
            assert costs.memory.forward == walked.memory.after_forward
            assert costs.memory.backward_weight == -walked.memory.after_input
            assert costs.memory.workspace == pytest.approx(walked.memory.workspace, rel=0.02)


def test_the_limit_assumes_an_even_share_of_the_layers_per_rank(problem: LayeredProblem) -> None:
    each = [layer.costs.memory for layer in problem.model.each]
    static = sum(memory.static for memory in each) / P + max(memory.workspace for memory in each)
    held = sum(memory.forward for memory in each) / P
    assert problem.limit == pytest.approx([problem.static[0] + static + 0.5 * 2 * held] * P)


def test_the_report_has_the_measurements_of_every_layer(written: Path) -> None:
    ranks = json.loads((written / "report.json").read_text())["ranks"]
    found = [[layer["name"] for layer in rank["layers"]] for rank in ranks]
    assert found == [["embedding", "block.0"], ["block.1", "block.2", "head"]]
    for rank in ranks:
        assert rank["stages"] == []
        for layer in rank["layers"]:
            for measured in (layer["kept"], layer["recomputed"]):
                assert 0 < measured["forward"]["median"] <= measured["forward"]["p90"]
                assert measured["held_after_weight"] == 0


def test_layouts_can_use_the_profile(written: Path) -> None:
    found = parse_profile(json.loads((written / "problem.json").read_text()), "problem.json")
    assert (found.microbatch_size, found.sequence, found.tensor) == (2, 32, 1)
    assert [layer.name for layer in found.layers] == ["embedding", "block", "head"]
    assert all(layer.update is not None and layer.update > 0 for layer in found.layers)
    assert all(layer.recomputed is not None for layer in found.layers)
    report = json.loads((written / "report.json").read_text())["ranks"]
    reductions = report[0]["reductions"]
    assert [(each["ranks"], each["is_sharded"]) for each in reductions] == [(P, False), (P, True)]
    # On a busy machine, small and large ones may take equally long; those have no bandwidth and do not count.
    usable = [each["is_sharded"] for each in reductions if each["bandwidth"] is not None]
    assert [ranks for ranks, _ in found.all_reduce] == [P] * usable.count(False)
    assert [ranks for ranks, _ in found.scatter_gather] == [P] * usable.count(True)
    assert dict(found.program)["precision"] == "float32"


# --- captured layers


def test_layers_are_captured_with_their_own_tensors() -> None:
    model = hard_model()
    names = model.layer_names()
    whole = model.build_layers(names[2:5], CPU).train()
    x, gradient = torch.randn(2, 5, 12), torch.randn(2, 5, 12)
    outputs = []
    y = x.clone().requires_grad_()
    for layer in whole:
        y = layer(y)
        y.retain_grad()
        outputs.append(y)
    y.backward(gradient)  # type: ignore[no-untyped-call]  # torch's own
    gradients = [each.grad for each in outputs]

    captured = Captured(Stage(1, 3, whole, 1), x, None, gradient, torch.empty(0))
    for is_recomputed in (False, True):
        found = split_into_layers(captured, model, 2, len(names), is_recomputed=is_recomputed)
        assert list(found) == [2, 3, 4]
        inputs = [x, *outputs]
        for each, before, after, expected in zip(found.values(), inputs, outputs, gradients, strict=False):
            assert each.stage.is_recomputed == is_recomputed
            torch.testing.assert_close(each.input, before.detach())
            torch.testing.assert_close(each.output, after.detach())
            torch.testing.assert_close(each.gradient, expected)
            assert each.target is None


def test_the_last_layer_gets_the_target_and_returns_the_loss() -> None:
    model = hard_model()
    names = model.layer_names()
    module = model.build_layers(names[7:], CPU).train()
    x, target = torch.randn(2, 5, 12), torch.randn(2, 5, 17)
    captured = Captured(Stage(1, 2, module, 1, model.loss), x, target, None, torch.empty(0))
    (last,) = split_into_layers(captured, model, 7, len(names)).values()
    assert last.target is target
    assert last.gradient is None
    torch.testing.assert_close(last.output, model.loss(module(x), target).detach())


# --- measurements as a document


def stage(at: int, seconds: float, held: int = 100) -> StageProfile:
    forward, *others = (Spread(seconds * factor, 2 * seconds * factor) for factor in (1, 2, 3, 4))
    return StageProfile(at, forward, others[0], others[1], others[2], held, 60, 0, 7, SplitShare(1.0, ()))


def layer(at: int, name: str, seconds: float, held: int = 100) -> LayerProfile:
    static = StaticBytes(parameters=50, gradients=50, optimizer=100)
    return LayerProfile(name, stage(at, seconds, held), stage(at, 2 * seconds, 20), static, 40)


def ranks() -> list[RankProfile]:
    """In another order than the ranks."""
    samples = tuple(LinkSample(size, Spread(1e-5 + size * 1e-9, 1e-3)) for size in (1000, 100_000))
    links = (LinkProfile(0, 1, samples, 0.0, None), LinkProfile(1, 0, samples, 0.0, None))
    connected = StaticBytes(communicators=7)
    return [
        RankProfile(1, (), StaticBytes(), {}, (), (layer(2, "block.1", 3e-3), layer(3, "head", 5e-3))),
        RankProfile(0, (), connected, {}, links, (layer(0, "in", 1e-3), layer(1, "block.0", 1e-3))),
    ]


def options(**changed: Any) -> ProfileOptions:
    return replace(ProfileOptions(ModelSpec("a:b"), P, microbatches=8, by_layer=True), **changed)


def test_layers_of_one_kind_cost_the_mean_and_are_written_once() -> None:
    document = to_layered_document(options(), ranks())
    written = [(each["name"], each.get("repeat")) for each in document["layers"]]
    assert written == [("in", None), ("block", 2), ("head", None)]
    _, block, head = document["layers"]
    times = [block[of] for of in ("forward", "backward_input", "backward_weight", "backward")]
    assert times == [2000.0, 4000.0, 6000.0, 8000.0]
    assert block["memory"] == {
        "forward": 100,
        "backward_input": -40,
        "backward_weight": -60,
        "static": 200,
        "workspace": 7,
    }
    assert block["recompute"]["forward"] == 4000.0
    assert block["recompute"]["memory"]["forward"] == 20
    assert (head["forward"], head["parameters_bytes"], head["output_bytes"]) == (5000.0, 50, 40)
    assert document["memory"] == {"static": 3 * 2 * 40 + 7, "limit": None}


def test_layers_with_other_memory_are_of_another_kind() -> None:
    alike = [layer(at, f"block.{at}", 1e-3 * (at + 1)) for at in range(3)]
    other = [alike[0], replace(alike[1], output_bytes=41), layer(2, "block.2", 3e-3, held=101)]
    assert [each.kept.forward.median for each in as_kinds(alike)] == pytest.approx([2e-3] * 3)
    assert [each.kept.forward.median for each in as_kinds(other)] == [1e-3, 2e-3, 3e-3]
    assert [each.kept.stage for each in as_kinds(alike)] == [0, 1, 2]


def test_a_run_of_equal_layers_ends_where_one_differs_and_keeps_all_names() -> None:
    """The second kind has no layer number 0, so each of its layers keeps its name."""
    held = (100, 100, 101, 101)
    layers = tuple(layer(at, f"block.{at}", 1e-3, held=each) for at, each in enumerate(held))
    document = to_layered_document(options(), [RankProfile(0, (), StaticBytes(), {}, (), layers)])
    written = [(each["name"], each.get("repeat")) for each in document["layers"]]
    assert written == [("block", 2), ("block.2", None), ("block.3", None)]
    problem: Any = parse_any_problem(document)
    assert list(problem.model.names) == [each.name for each in layers]


def test_the_link_is_a_line_through_the_transfers_of_all_links() -> None:
    document = to_layered_document(options(), ranks())
    assert document["costs"] == {"link": {"latency": 10.0, "bandwidth": 1000.0}}
    without = [replace(rank, links=()) for rank in ranks()]
    assert to_layered_document(options(), without)["costs"] == {"p2p": 0.0}


def test_conditions_and_costs_per_step_are_written_if_microbatches_have_sequences() -> None:
    samples = (LinkSample(1000, Spread(1e-3, 1e-3)),)
    reductions = (
        ReductionProfile(2, False, samples, 1e-5, 2e9),
        ReductionProfile(2, True, samples, 2e-5, 1e9),
        ReductionProfile(4, False, samples, 1e-5, None),
    )
    last, first = ranks()
    first = replace(first, input_shape=(3, 64), reductions=reductions)
    updated = [replace(each, update=Spread(1e-3 * (at + 1), 1.0)) for at, each in enumerate(last.layers)]
    document = to_layered_document(options(), [replace(last, layers=tuple(updated)), first])
    assert document["profile"] == {
        "microbatch_size": 3,
        "sequence_length": 64,
        "tensor_parallel": 1,
        "update": {"block": 1000.0, "head": 2000.0},
        "all_reduce": [{"ranks": 2, "latency": 10.0, "bandwidth": 2000.0}],
        "scatter_gather": [{"ranks": 2, "latency": 20.0, "bandwidth": 1000.0}],
    }
    assert "profile" not in to_layered_document(options(), [last, replace(first, input_shape=(3,))])


def test_recomputation_that_saves_no_memory_is_left_out() -> None:
    found = [replace(rank, layers=tuple(map(_as_large, rank.layers))) for rank in ranks()]
    assert not any("recompute" in each for each in to_layered_document(options(), found)["layers"])


def _as_large(found: LayerProfile) -> LayerProfile:
    return replace(found, recomputed=replace(found.kept, held_after_forward=100))


def test_tied_ends_are_planned_on_one_rank() -> None:
    assert to_layered_document(options(), ranks(), is_tied=True)["placement"] == "v"
    assert to_layered_document(options(), ranks())["placement"] == "auto"


def test_a_ranks_layer_measurements_survive_their_file() -> None:
    for found in ranks():
        assert read_rank(rank_json(found)) == found


# --- refusals


TINY = ["profile", "--model", "zbv_worker.models.tiny:tiny"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*TINY, "--recompute"], "--recompute measures layers, but --model gives a Tiny without layer_names"),
        ([*PROFILE, "--recompute", "--by-stage"], "--recompute: cannot be combined with --by-stage"),
        (
            ["profile", "--model", "nowhere.at:all"],
            "zbv-worker: --model nowhere.at:all: found no module 'nowhere'",
        ),
        ([*PROFILE, "--copies"], "--copies: needs --by-stage"),
        ([*PROFILE, "--report", "no/where.json"], "--report no/where.json: No such file or directory."),
    ],
)
def test_impossible_measurements_are_refused_at_once(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*arguments, "--pp", "1", "--microbatches", "1", "-o", str(tmp_path / "p.json")]) == 2
    assert said in capsys.readouterr().err


def test_every_rank_needs_a_layer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = [*PROFILE, "--pp", "6", "--microbatches", "1"]
    assert main([*arguments, "-o", str(tmp_path / "p.json")]) == 2
    assert "found 5 layers and 6 ranks" in capsys.readouterr().err
