"""A pipeline in one process without any environment, as in a notebook."""

from __future__ import annotations

import copy
import runpy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zbv_worker as zbv
from support.cut_models import cut_problem
from support.gradients import gradients, train_plainly
from support.paths import ROOT
from support.plans import searched, unit_problem
from torch import nn
from torch.nn import functional as nnf
from zbv_solver.plans.plan import Plan

NAMES = ["a", "b.0", "b.1", "c"]


@pytest.fixture(scope="module")
def layered() -> Plan:
    return searched(cut_problem(NAMES, (1, 3), microbatches=2))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))


def batch(rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 3), torch.randn(rows, 2)


def test_a_plan_with_layers_decides_the_cut(layered: Plan) -> None:
    layers = dict(zip(NAMES, model(), strict=True))
    with zbv.Pipeline(layered, layers, loss=nnf.mse_loss) as pipe:
        pipe.step(*batch())
        assert {index: len(list(module.children())) for index, module in pipe.modules.items()} == {0: 1, 1: 3}
        assert [name for name, _ in pipe.named_parameters()] == [
            f"{layer}.{kind}" for layer in ("a", "b.1", "c") for kind in ("weight", "bias")
        ]
        assert set(pipe.state_dict()) == {name for name, _ in pipe.named_parameters()}


def test_an_evaluation_needs_no_loss_and_leaves_no_gradients(plan: Plan) -> None:
    inputs, _ = batch()
    layers = nn.Sequential(*model(), nn.Dropout())
    with zbv.Pipeline(plan, layers) as pipe:
        loss, outputs = pipe.evaluate(inputs, outputs=True)
        assert loss is None
        torch.testing.assert_close(torch.cat(outputs), model()(inputs))
        assert all(parameter.grad is None for parameter in pipe.parameters())
        assert pipe.modules[0].training
        with pytest.raises(zbv.InvalidRun, match="the pipeline has no loss; training needs one"):
            pipe.step(*batch())


def test_a_step_without_the_targets_that_its_loss_needs_says_so(plan: Plan) -> None:
    pipe = zbv.Pipeline(plan, model(), loss=nnf.mse_loss)
    with pytest.raises(zbv.InvalidRun, match=r"the loss got None as target and failed: .*Pass targets"):
        pipe.step(batch()[0])


def weighted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (output - target).square().sum(), 3 * len(output)


def test_the_norm_of_the_gradients_is_that_of_the_parameters_that_are_trained_now(plan: Plan) -> None:
    layers = model()
    layers[2].requires_grad_(False)
    with zbv.Pipeline(plan, layers, nnf.mse_loss) as pipe:
        pipe.step(*batch())
        layers.zero_grad()
        layers[2].requires_grad_(True)
        pipe.step(*batch())
        expected = torch.nn.utils.get_total_norm([p.grad for p in layers.parameters() if p.grad is not None])
        torch.testing.assert_close(pipe.clip_grad_norm_(1e9), expected)


def test_parameters_may_be_added_frozen_and_unfrozen_between_steps(plan: Plan) -> None:
    inputs, targets = batch()
    layers = model()
    layers[0].requires_grad_(False)
    with zbv.Pipeline(plan, layers, loss=weighted) as pipe:
        pipe.step(inputs, targets)
        layers[0].requires_grad_(True)
        layers[2].requires_grad_(False)
        layers[3].register_parameter("more", nn.Parameter(torch.ones(3)))
        layers.zero_grad()
        pipe.step(inputs, targets)
        found = gradients(pipe)
        layers.zero_grad()
        train_plainly(layers, weighted, (inputs, targets))
    assert found["2.weight"] is None
    torch.testing.assert_close(found, gradients(layers))


def test_a_step_without_gradients_is_refused(plan: Plan) -> None:
    with zbv.Pipeline(plan, model(), loss=nnf.mse_loss) as pipe:
        with torch.no_grad(), pytest.raises(zbv.InvalidRun, match=r"found step within torch\.no_grad"):
            pipe.step(*batch())
        with torch.inference_mode():
            pipe.evaluate(*batch())
        assert pipe.step(*batch()) is not None


def test_a_default_device_does_not_matter(plan: Plan) -> None:
    inputs, targets = batch()
    layers = model()
    with torch.device("meta"), zbv.Pipeline(plan, layers, loss=nnf.mse_loss) as pipe:
        assert pipe.step(inputs, targets).device.type == "cpu"
        assert pipe.full_state_dict() is not None


class Auxiliary(nn.BatchNorm1d):
    """Has running means, random numbers and an auxiliary loss."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = super().forward(input) + torch.rand(())
        return zbv.add_auxiliary_loss(x, 0.1 * x.square().mean(), weight=1.0)


def test_a_first_step_that_is_repeated_has_no_side_effects(plan: Plan) -> None:
    """It is repeated because the auxiliary losses did not know that the loss has weights."""
    layer = Auxiliary(3)
    inputs, targets = batch()
    with zbv.Pipeline(plan, [layer, nn.Linear(3, 2)], loss=weighted) as pipe:
        torch.manual_seed(0)
        pipe.step(inputs, targets)
        drawn = torch.rand(())
    torch.manual_seed(0)
    torch.testing.assert_close(drawn, torch.rand(3)[2])
    assert layer.num_batches_tracked == 2


def test_a_closed_pipeline_says_so(plan: Plan) -> None:
    pipe = zbv.Pipeline(plan, model(), loss=nnf.mse_loss)
    pipe.step(*batch())
    pipe.close()
    pipe.close()
    for call in (pipe.step, pipe.evaluate):
        with pytest.raises(zbv.WorkerError, match=r"this pipeline is closed\. Make a new one"):
            call(*batch())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"layers": 3}, "layers: found a int; must be a list of layers"),
        ({"layers": [nn.Tanh(), 3]}, "layer 1: found a int; must be an nn.Module, or a function"),
        ({"plan": "nowhere.json"}, "found no file nowhere.json .* pass service=URL too"),
        ({"plan": 3}, "found a int as the plan; must be a plan"),
        ({"plan": "http://localhost/plan"}, "a plan's URL must end with /plans/ID"),
        ({"plan": {"problem": 1}}, "the plan: "),
        ({"plan": '{"problem": 1}'}, "found the text of a plan; must be decoded"),
        (
            {"plan": "a/plan.json", "service": "http://localhost"},
            "found a/plan.json as the plan, and service=",
        ),
        ({"precision": "float8"}, "found precision 'float8'; must be one of float32, bfloat16, float16"),
        ({"backend": "mpi"}, "found backend 'mpi'; must be 'gloo' or 'nccl'"),
        ({"device": "gpu"}, "found device 'gpu'; must be 'cpu', 'cuda' or 'cuda:N'"),
        ({"microbatches": "8"}, "found microbatches='8'; must be an integer of at least 1"),
        ({"loss": "mse"}, "loss: found 'mse'; must be a function of output and target"),
        ({"loss": nn.MSELoss}, "loss: found <class .*; must be a function of output and target"),
        ({"plan": {"pp_degree": 1}}, "this is a problem, not a plan. `zbv plan`"),
        ({"device": "cpu", "backend": "nccl"}, "found device cpu and backend 'nccl'"),
    ],
)
def test_wrong_arguments_are_refused(plan: Plan, more: dict[str, Any], message: str) -> None:
    arguments = {"plan": plan, "layers": model(), **more}
    with pytest.raises(zbv.InvalidRun, match=message):
        zbv.Pipeline(**arguments)
    assert not dist.is_initialized()


def test_a_plan_for_other_layers_or_ranks_is_refused(layered: Plan) -> None:
    with pytest.raises(zbv.InvalidRun, match=r"at layer 0 it has 'a', the model '0'.*the layers the plan's"):
        zbv.Pipeline(layered, model())
    two = searched(unit_problem(2, 2))
    with pytest.raises(zbv.InvalidRun, match=r"found 1 ranks; the plan is for 2\. Start 2 ranks"):
        zbv.Pipeline(two, model())


def test_a_wrong_batch_leaves_the_pipeline_usable(plan: Plan) -> None:
    with zbv.Pipeline(plan, model(), loss=nnf.mse_loss) as pipe:
        with pytest.raises(zbv.InvalidRun, match="inputs has 3 rows; must be a multiple"):
            pipe.step(*batch(3))
        with pytest.raises(zbv.InvalidRun, match="no step to trace"):
            pipe.trace()
        assert pipe.step(*batch()) is not None


def test_an_error_inside_the_block_ends_the_pipeline(plan: Plan) -> None:
    with pytest.raises(ZeroDivisionError), zbv.Pipeline(plan, model(), loss=nnf.mse_loss) as pipe:
        raise ZeroDivisionError
    assert not dist.is_initialized()
    with pytest.raises(zbv.WorkerError, match=r"has failed in an earlier call \(rank 0: ZeroDiv"):
        pipe.step(*batch())


def test_a_state_dict_of_another_model_is_refused(plan: Plan) -> None:
    with zbv.Pipeline(plan, model()) as pipe:
        state = dict(pipe.state_dict())
        with pytest.raises(zbv.InvalidRun, match=r"has 0\.scale, which the layers do not have"):
            pipe.load_state_dict({**state, "0.scale": torch.zeros(1)})
        with pytest.raises(zbv.InvalidRun, match=r"(?s)the state dict does not fit: .*size mismatch"):
            pipe.load_state_dict({**state, "0.bias": torch.zeros(1)})
        del state["3.bias"]
        with pytest.raises(zbv.InvalidRun, match=r"lacks 3\.bias"):
            pipe.load_state_dict(state)


def test_the_example_of_a_sequential_trains(capsys: pytest.CaptureFixture[str]) -> None:
    """It has at most ten lines besides the model and its data."""
    example = ROOT / "examples" / "sequential.py"
    runpy.run_path(str(example))
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 20
    assert losses[-1] < 0.6 * losses[0]
    code = example.read_text().partition("batches = ")[2].splitlines()[1:]
    assert len([line for line in code if line]) <= 10


class Complex(nn.Module):
    """A layer with complex numbers inside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.complex64)

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(torch.complex(x, x.cos())).abs()


def test_where_w_has_little_to_do_is_said_once(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), Complex(), Complex())
    reference = copy.deepcopy(layers)
    inputs, targets = torch.randn(4, 3), torch.randn(4, 4)
    train_plainly(reference, nnf.mse_loss, (inputs, targets))
    with zbv.Pipeline(plan, layers, loss=nnf.mse_loss) as pipe:
        for _ in range(2):
            layers.zero_grad()
            pipe.step(inputs, targets)
        torch.testing.assert_close(gradients(layers), gradients(reference))
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "of the weight gradients" in line]
    assert "linear (Linear)" in said
    assert [type(layer) for layer in layers] == [nn.Linear, nn.Linear, Complex, Complex]
    assert type(layers) is nn.Sequential
