"""Recomputed stages: the same gradients, and almost no memory held after F."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

import pytest
import torch
from support.cut_models import cut_problem
from support.gradients import relative_error
from support.selfcheck import Gradients, hard_model, random_orders, reference_gradients, run_in_threads
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
from zbv_worker.measure.stage_memory import stage_memory
from zbv_worker.models.gpt import GPT, gpt
from zbv_worker.stage.program import Program
from zbv_worker.stage.stage import Stage

CPU = torch.device("cpu")
ROWS, WIDTH = 16, 32
TENSOR = ROWS * WIDTH * 4


@pytest.fixture(scope="module")
def reference() -> tuple[Gradients, float]:
    return reference_gradients(hard_model(), 4)


# --- whole plans


@pytest.mark.parametrize(
    ("sizes", "recompute"),
    [
        ((3, 2, 2, 1), (True, True, True, True)),
        ((1, 4, 1, 2), (True, False, False, True)),
        ((1, 4, 0, 3), (False, True, True, False)),
        ((6, 1, 1, 0), (True, True, False, True)),
    ],
)
@pytest.mark.parametrize("fused", [0.0, 0.4, 1.0])
def test_recomputed_stages_compute_the_gradients_of_one_process(
    reference: tuple[Gradients, float],
    sizes: tuple[int, ...],
    recompute: tuple[bool, ...],
    fused: float,
) -> None:
    problem = cut_problem(hard_model().layer_names(), sizes, recompute)
    found, loss = run_in_threads(problem, random_orders(problem, Random(1), fused), hard_model())
    assert relative_error(found, reference[0]) <= 1e-5
    assert loss == pytest.approx(reference[1], rel=1e-6)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_recomputation_changes_no_bit_of_the_gradients(precision: str) -> None:
    """With dropout: the random numbers of F are repeated, although others drew in between."""
    kept, again = (gradients_of(dropout_gpt(), problem, precision) for problem in (plain(), recomputing()))
    assert kept.keys() == again.keys()
    assert all(torch.equal(kept[name], again[name]) for name in kept)
    other = gradients_of(dropout_gpt(), recomputing(), precision, seed=1)
    assert not all(torch.equal(kept[name], other[name]) for name in kept)  # dropout did draw


def dropout_gpt() -> GPT:
    return gpt(layers=2, width=16, heads=2, length=8, sequences=2, characters=20_000, dropout=0.3)


def plain() -> Problem:
    return cut_problem(dropout_gpt().layer_names(), (3, 1))


def recomputing() -> Problem:
    return cut_problem(dropout_gpt().layer_names(), (3, 1), (True, True))


def gradients_of(model: GPT, problem: Problem, precision: str, seed: int = 0) -> Gradients:
    """Gradients of one rank with two microbatches in flight."""
    plan = RankPlan.of("plan", problem, random_orders(problem, Random(0)), 0)
    stages = build_stages(model, plan, CPU, program=Program(precision))  # type: ignore[arg-type]  # parametrized
    torch.manual_seed(seed)
    batches = [model.microbatch(0, j) for j in range(2)]
    outputs = [stages[0].forward(j, x, split=True) for j, (x, _) in enumerate(batches)]
    for j, (_, target) in enumerate(batches):
        stages[1].forward(j, outputs[j], target, split=True)
    for j in (1, 0):
        gradient = stages[1].backward_input(j, None)
        assert gradient is not None
        stages[0].backward_input(j, gradient)
    for stage in stages.values():
        for j in (0, 1):
            stage.backward_weight(j)
        assert stage.held == (set(), set())
    return {
        name: parameter.grad
        for stage in stages.values()
        for name, parameter in stage.module.named_parameters()
        if parameter.grad is not None
    }


class Queries(nn.Module):
    """Returns a view of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.expand_as(x)


@pytest.mark.parametrize("module", [nn.Flatten(0), nn.Identity(), Queries()])
def test_recomputed_stages_may_return_a_view_of_their_input_or_of_a_parameter(module: nn.Module) -> None:
    x, found = torch.randn(3, 4), []
    for is_recomputed in (False, True):
        module.zero_grad()
        stage = Stage(1, 3, module, 1, is_recomputed=is_recomputed)
        output = stage.forward(0, x, split=True)
        found.append([output, stage.backward_input(0, output.cos()), *(p.grad for p in module.parameters())])
    torch.testing.assert_close(found[1], found[0])


class Statistics(nn.Module):
    """Updates one buffer in place, and replaces another one."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Tensor
        self.total: Tensor
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.total = self.total + x.detach().sum()
        return x * 2


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, partial(nn.InstanceNorm1d, track_running_stats=True)])
def test_buffers_are_updated_once_per_microbatch(kind: Callable[[int], nn.Module]) -> None:
    xs = [torch.randn(3, 4, 5) for _ in range(2)]
    found = []
    for is_recomputed in (False, True):
        layers = [kind(4), Statistics(), nn.Sequential(kind(4), kind(4).eval())]
        module = nn.Sequential(*layers)
        stage = Stage(1, 3, module, 1, layers=layers, is_recomputed=is_recomputed)
        outputs = [stage.forward(at, x, split=True) for at, x in enumerate(xs)]
        gradients = [stage.backward_input(at, output.cos()) for at, output in enumerate(outputs)]
        found.append([outputs, gradients, module.state_dict()])
    torch.testing.assert_close(found[1], found[0])


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
    peaks, planned = {}, {}
    for is_recomputed in (False, True):
        problem = estimated_problem(model, is_recomputed)
        orders = random_orders(problem, Random(1))
        peaks[is_recomputed] = activations_peak(model, problem, orders)
        assert problem.model is not None
        parameters = sum(layer.costs.memory.static for layer in problem.model.model.each)
        (most,) = make_plan(problem, orders, method="test").metrics.peak_memory
        planned[is_recomputed] = most - parameters
    for is_recomputed, peak in peaks.items():
        assert 0.85 * planned[is_recomputed] < peak <= 1.01 * planned[is_recomputed]
    assert peaks[True] < 0.7 * peaks[False]


def estimated_problem(model: GPT, is_recomputed: bool) -> Problem:
    """Both stages on one rank."""
    document = estimated_document(list(estimate_layers(model)), 1, 6, Scale())
    names = list(model.layer_names())
    document["partition"] = [names[:3], names[3:]]
    document |= {"placement": "v", "recompute": [is_recomputed] * 2}
    problem = parse_any_problem(document)
    assert isinstance(problem, Problem)
    return problem


def activations_peak(model: GPT, problem: Problem, orders: Orders) -> int:
    """The largest number of live bytes in a step, with gradients present from the start."""
    plan = RankPlan.of("plan", problem, orders, 0)
    stages = build_stages(model, plan, CPU)
    executor = Executor(plan, stages, model, ThreadHub(1).transport(0), device=CPU, timeout=5)
    executor.step(0)
    with LiveBytes() as live:
        executor.step(1)
    return live.peak


# --- one stage


def four_layers() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Tanh()) for _ in range(4)]


def stage_of(layers: list[nn.Module], *, by_layer: bool, is_recomputed: bool = True) -> Stage:
    return Stage(
        1,
        3,
        nn.Sequential(*layers),
        1,
        layers=tuple(layers) if by_layer else None,
        is_recomputed=is_recomputed,
    )


@pytest.mark.parametrize(("by_layer", "inputs"), [(True, 4), (False, 1)])
def test_f_holds_only_inputs_and_i_only_the_operands_of_w(by_layer: bool, inputs: int) -> None:
    stage = stage_of(four_layers(), by_layer=by_layer)
    x, gradient = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    stage.forward(0, x, split=False)
    stage.backward(0, gradient)
    found = stage_memory(stage, x, None, gradient, CPU)
    assert found.after_forward == inputs * TENSOR
    assert found.after_input == 8 * TENSOR  # inputs and output gradients of four Linears
    assert found.after_weight == 0


def test_only_one_layers_recomputed_activations_exist_at_a_time() -> None:
    x, gradient = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    found = {}
    for by_layer in (True, False):
        stage = stage_of(four_layers(), by_layer=by_layer)
        stage.forward(0, x, split=False)
        stage.backward(0, gradient)
        found[by_layer] = stage_memory(stage, x, None, gradient, CPU)
    # Two activations of each of the other three layers, less what their inputs are.
    assert found[True].workspace <= found[False].workspace - 3 * TENSOR


def test_a_layers_output_is_released_before_its_backward() -> None:
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    stage = Stage(1, 3, layer, 1, is_recomputed=True)
    x, gradient = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    stage.forward(0, x, split=False)
    stage.backward(0, gradient)
    # B: the received gradient, and the input's and the weight's gradient, in addition to what F held.
    assert stage_memory(stage, x, None, gradient, CPU).workspace == 2 * TENSOR + WIDTH * WIDTH * 4


def test_the_loss_is_recomputed_with_the_layer_before_it() -> None:
    """The last stage holds no logits, which may be larger than all activations."""
    head = nn.Linear(WIDTH, 100 * WIDTH)
    layers = (nn.Tanh(), head)
    stage = Stage(
        1,
        2,
        nn.Sequential(*layers),
        1,
        lambda y, t: (y - t).square().mean(),
        layers=layers,
        is_recomputed=True,
    )
    x, target = torch.randn(ROWS, WIDTH), torch.randn(ROWS, 100 * WIDTH)
    stage.forward(0, x, target, split=False)
    stage.backward(0, None)
    assert stage_memory(stage, x, target, None, CPU).after_forward == 2 * TENSOR


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
        results.append([stage.backward_input(j, gradient)])
        stage.backward_weight(j)
        results[-1] += [parameter.grad for parameter in stage.module.parameters()]
    for kept, again in zip(*results, strict=True):
        assert kept is not None
        assert again is not None
        torch.testing.assert_close(kept, again, rtol=0, atol=0)


class Counting(nn.Module):
    """Records for every run whether it had a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.ran.append(torch.is_grad_enabled())
        return x.tanh()


def test_f_runs_without_a_graph_and_the_backward_runs_it_once_more_with_one() -> None:
    layer = Counting()
    stage = Stage(1, 3, layer, 1, is_recomputed=True)
    stage.forward(0, torch.ones(3), split=True)
    assert layer.ran == [False]
    stage.backward_input(0, torch.ones(3))
    assert layer.ran == [False, True]
    stage.backward_weight(0)
    assert layer.ran == [False, True]


@pytest.mark.parametrize("index", [0, 1])
def test_layers_without_a_gradient_pass_none_on(index: int) -> None:
    """A frozen stage; a stage that ignores its input returns zeros, as without recomputation."""
    frozen = nn.Linear(3, 3).requires_grad_(False)
    stage = Stage(index, 3, nn.Sequential(frozen), 1, layers=(frozen,), is_recomputed=True)
    stage.forward(0, torch.ones(2, 3), split=True)
    gradient = stage.backward_input(0, torch.ones(2, 3))
    stage.backward_weight(0)
    assert frozen.weight.grad is None
    if index == 0:
        assert gradient is None
    else:
        assert gradient is not None
        torch.testing.assert_close(gradient, torch.ones(2, 3) @ frozen.weight)


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.value * 2


def test_an_unused_input_has_the_gradient_zero() -> None:
    layer = Constant()
    stage = Stage(1, 3, layer, 1, is_recomputed=True)
    stage.forward(0, torch.ones(2), split=False)
    gradient = stage.backward(0, torch.ones(2))
    assert gradient is not None
    assert gradient.tolist() == [0.0, 0.0]
    assert layer.value.grad is not None
    assert layer.value.grad.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("index", [0, 1])
def test_a_recomputed_layer_that_modifies_its_input_is_refused(index: int) -> None:
    """Without a graph torch does not notice, and the recomputation would use another input."""
    layers = (nn.Tanh(), nn.Dropout(0.5, inplace=True))
    stage = Stage(index, 3, nn.Sequential(*layers), 1, layers=layers, is_recomputed=True)
    with pytest.raises(ModelError, match=rf"stage {index}: a Dropout modified its input"):
        stage.forward(0, torch.ones(2), split=False)


def test_a_layer_may_modify_its_own_tensors() -> None:
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))
    x, gradient = torch.randn(2, 3, WIDTH), torch.randn(2, 3, WIDTH)
    found = []
    for is_recomputed in (False, True):
        stage = Stage(1, 3, layer, 1, is_recomputed=is_recomputed)
        stage.forward(0, x, split=True)
        found.append(stage.backward_input(0, gradient))
        stage.backward_weight(0)
    kept, again = found
    assert kept is not None
    assert again is not None
    assert torch.equal(kept, again)
