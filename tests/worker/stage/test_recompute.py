"""Recomputed stages: the same gradients, and almost no memory held after F."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from support.functions import Function
from support.gradients import gradients_of
from support.selfcheck import random_orders
from support.stages import backward
from support.thread_transport import ThreadHub
from torch import Tensor, nn
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.reading import parse_any_problem
from zbv_solver.search.assemble import make_plan
from zbv_worker.errors import ModelError
from zbv_worker.execution.build_stages import build_stages
from zbv_worker.execution.executor import Executor
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.measure.estimate.document import Scale, estimated_document
from zbv_worker.measure.estimate.estimate import estimate_layers
from zbv_worker.measure.live_bytes import LiveBytes
from zbv_worker.measure.stage_memory import StageMemory, stage_memory
from zbv_worker.models.gpt import GPT, gpt
from zbv_worker.stage.program import AUTOCAST, Precision
from zbv_worker.stage.stage import Stage

CPU = torch.device("cpu")
ROWS, WIDTH = 16, 32
TENSOR = ROWS * WIDTH * 4


# --- whole plans


def queries() -> nn.Module:
    """Returns a view of its parameter; the gradient of its input is 0."""
    return Function(lambda self, x: self.weight.expand_as(x), weight=nn.Parameter(torch.randn(1, 5)))


def statistics() -> nn.Module:
    """Updates one buffer in place, and replaces another one."""

    def compute(self: Any, x: Tensor) -> Tensor:
        self.count += 1
        self.total = self.total + x.detach().sum()
        return x * 2

    return Function(compute, **{name: nn.Buffer(torch.zeros(())) for name in ("count", "total")})


LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    "view of the input": lambda: [nn.Flatten(0)],
    "the input": lambda: [nn.Identity()],
    "view of a parameter": lambda: [queries()],
    "frozen": lambda: [nn.Linear(5, 5).requires_grad_(False)],
    "writes to its own tensor": lambda: [nn.Sequential(nn.Linear(5, 5), nn.ReLU(inplace=True))],
    "batch norms": lambda: [
        nn.BatchNorm1d(4),
        statistics(),
        nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4).eval()),
    ],
    "dropout": lambda: [nn.Linear(5, 5), nn.Sequential(nn.Dropout(0.3), nn.Linear(5, 5), nn.Dropout(0.3))],
    "instance norm": lambda: [nn.InstanceNorm1d(4, track_running_stats=True)],
}


@pytest.mark.parametrize(("precision", "index"), [("float32", 1), ("bfloat16", 0)])
@pytest.mark.parametrize("name", LAYERS)
def test_two_recomputed_microbatches_have_equal_results(name: str, precision: Precision, index: int) -> None:
    """Outputs, gradients, and buffers, which only F updates.

    The random numbers of F are repeated, although the other microbatch drew in between.
    """
    kept = LAYERS[name]()
    xs, found = [torch.randn(3, 4, 5) for _ in range(2)], []
    for layers in (copy.deepcopy(kept), kept):
        module, autocast = nn.Sequential(*layers), AUTOCAST[precision]
        stage = Stage(index, 3, module, 1, None, autocast, layers=layers, is_recomputed=layers is not kept)
        torch.manual_seed(0)
        outputs = [stage.forward(at, x, split=True) for at, x in enumerate(xs)]
        gradients = [stage.backward_input(at, outputs[at].cos()) for at in (1, 0)]
        for at in range(2):
            stage.backward_weight(at)
        assert stage.held == (set(), set())
        found.append([outputs, gradients, [p.grad for p in module.parameters()], module.state_dict()])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_recomputation_does_not_change_later_random_numbers() -> None:
    stage = Stage(1, 3, nn.Dropout(0.5), 1, is_recomputed=True)
    stage.forward(0, torch.ones(4), split=False)
    torch.rand(1)  # as another microbatch in between would
    state = torch.get_rng_state()
    stage.backward(0, torch.ones(4))
    assert torch.equal(torch.get_rng_state(), state)


# --- the memory of a run


def test_recomputation_lowers_the_peak_as_planned() -> None:
    """Six microbatches, with the costs of `zbv-worker estimate`."""
    model = gpt(layers=4, width=32, heads=2, length=32, sequences=2, characters=20_000)
    layers, peaks, planned = list(estimate_layers(model)), {}, {}
    for is_recomputed in (False, True):
        document = estimated_document(layers, 1, 6, Scale())
        names = list(model.layer_names())
        document["partition"] = [names[:3], names[3:]]  # both stages on one rank
        document |= {"placement": "v", "recompute": [is_recomputed] * 2}
        problem: Any = parse_any_problem(document)
        orders = random_orders(problem, Random(1))
        peaks[is_recomputed] = activations_peak(model, problem, orders)
        assert problem.model is not None
        parameters = sum(layer.costs.memory.static for layer in problem.model.model.each)
        (most,) = make_plan(problem, orders, method="test").metrics.peak_memory
        planned[is_recomputed] = most - parameters
    for is_recomputed, peak in peaks.items():
        assert 0.85 * planned[is_recomputed] < peak <= 1.01 * planned[is_recomputed]
    assert peaks[True] < 0.7 * peaks[False]


def activations_peak(model: GPT, problem: Problem, orders: Orders) -> int:
    """The largest number of live bytes in a step, with gradients present from the start."""
    plan = RankPlan.of("plan", problem, orders, 0)
    stages = build_stages(model, plan, CPU)
    executor = Executor(plan, stages, model, ThreadHub(1).transport(0), device=CPU, timeout=60)
    executor.step(0)
    with LiveBytes() as live:
        executor.step(1)
    return live.peak


# --- one stage


def four_layers() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Tanh()) for _ in range(4)]


def stage_of(layers: list[nn.Module], *, by_layer: bool, is_recomputed: bool = True) -> Stage:
    of = tuple(layers) if by_layer else None
    return Stage(1, 3, nn.Sequential(*layers), 1, layers=of, is_recomputed=is_recomputed)


def memory_of(stage: Stage, target: Tensor | None = None) -> StageMemory:
    """Of one microbatch, when the parameters have their gradients."""
    x, gradient = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH) if target is None else None
    stage.forward(0, x, target, split=False)
    stage.backward(0, gradient)
    return stage_memory(stage, x, target, gradient, CPU)


def test_f_holds_only_inputs_and_i_only_the_operands_of_w() -> None:
    """And only one layer's recomputed activations exist at a time."""
    found = {by_layer: memory_of(stage_of(four_layers(), by_layer=by_layer)) for by_layer in (True, False)}
    for by_layer, inputs in ((True, 4), (False, 1)):
        assert found[by_layer].after_forward == inputs * TENSOR
        assert found[by_layer].after_input == 8 * TENSOR  # inputs and output gradients of four Linears
        assert found[by_layer].after_weight == 0
    # Two activations of each of the other three layers, less what their inputs are.
    assert found[True].workspace <= found[False].workspace - 3 * TENSOR


def test_a_layers_output_is_released_before_its_backward() -> None:
    stage = stage_of([nn.Linear(WIDTH, WIDTH, bias=False)], by_layer=True)
    # B: the received gradient, and the input's and the weight's gradient, in addition to what F held.
    assert memory_of(stage).workspace == 2 * TENSOR + WIDTH * WIDTH * 4


def test_the_loss_is_recomputed_with_the_layer_before_it() -> None:
    """The last stage holds no logits, which may be larger than all activations."""
    layers = (nn.Tanh(), nn.Linear(WIDTH, 100 * WIDTH))
    stage = Stage(1, 2, nn.Sequential(*layers), 1, nn.functional.mse_loss, layers=layers, is_recomputed=True)
    assert memory_of(stage, torch.randn(ROWS, 100 * WIDTH)).after_forward == 2 * TENSOR


def test_recomputation_may_change_between_two_forwards() -> None:
    layers = four_layers()
    stage = stage_of(layers, by_layer=True, is_recomputed=False)
    x, gradient = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    results = []
    stage.forward(0, x, split=True)
    stage.is_recomputed = True
    stage.forward(1, x, split=True)
    stage.is_recomputed = False
    for j in (0, 1):
        stage.module.zero_grad()
        results.append([backward(stage, gradient, microbatch=j), gradients_of([stage.module])])
    assert len(results[0][1]) == 8
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_f_runs_without_a_graph_and_the_backward_runs_it_once_more_with_one() -> None:
    ran: list[bool] = []

    def compute(_: Any, x: Tensor) -> Tensor:
        ran.append(torch.is_grad_enabled())
        return x.tanh()

    stage = Stage(1, 3, Function(compute), 1, is_recomputed=True)
    stage.forward(0, torch.ones(3), split=True)
    assert ran == [False]
    stage.backward_input(0, torch.ones(3))
    assert ran == [False, True]
    stage.backward_weight(0)
    assert ran == [False, True]


@pytest.mark.parametrize("index", [0, 1])
def test_a_recomputed_layer_that_modifies_its_input_is_refused(index: int) -> None:
    """Without a graph torch does not notice, and the recomputation would use another input."""
    layers = (nn.Tanh(), nn.Dropout(0.5, inplace=True))
    stage = Stage(index, 3, nn.Sequential(*layers), 1, layers=layers, is_recomputed=True)
    with pytest.raises(ModelError, match=rf"stage {index}: a Dropout modified its input"):
        stage.forward(0, torch.ones(2), split=False)
