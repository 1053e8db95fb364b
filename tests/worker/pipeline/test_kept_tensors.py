"""What the user keeps: the graph of the inputs, the memory of gradients, and tensors of inference mode."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import zbv_worker as zbv
from support.gradients import gradients, train_plainly
from support.small_pipeline import ROWS, WIDTH, batch, flat_gradients, model, planned
from torch import Tensor, nn
from torch.nn import functional as nnf
from zbv_solver.plans.plan import Plan

MICROBATCHES = 4


@pytest.fixture(scope="module", params=["v", "single", "recomputed"])
def plan(request: pytest.FixtureRequest) -> Plan:
    return planned(request.param, MICROBATCHES)


def rest() -> list[nn.Module]:
    """All layers but the first."""
    return [*model()][1:]


def outer() -> nn.Linear:
    torch.manual_seed(7)
    return nn.Linear(WIDTH, WIDTH)


def positive(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Squared errors of the rows whose first target is positive, and their number."""
    rows = target[:, 0] > 0
    return (output - target).square().sum(1)[rows].sum(), rows.sum()


def test_the_gradient_of_inputs_reaches_the_module_that_made_them(plan: Plan) -> None:
    """In several steps, and in steps between whose inputs need none."""
    inputs, targets = batch()
    reference, plain, layers, own = model(), outer(), model(), outer()
    with zbv.Pipeline(plan, layers, positive) as pipe:
        for has_graph in (True, False, True):
            train_plainly(reference, positive, (plain(inputs) if has_graph else inputs, targets))
            pipe.step(own(inputs) if has_graph else inputs, targets)
        torch.testing.assert_close(gradients(own), gradients(plain))
        torch.testing.assert_close(gradients(layers), gradients(reference))


def test_a_leaf_gets_the_gradient_of_the_whole_batch(plan: Plan) -> None:
    inputs, targets = batch()
    expected, leaf = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    layers = model().requires_grad_(False)  # saliency: nothing else is trained
    train_plainly(layers, positive, (expected, targets))
    with zbv.Pipeline(plan, layers, positive) as pipe:
        loss_before = pipe.evaluate(leaf, targets)
        assert leaf.grad is None
        torch.testing.assert_close(pipe.step(leaf, targets), loss_before)
    torch.testing.assert_close(leaf.grad, expected.grad)


class Joined(nn.Linear):
    """A first layer of several inputs, of which one is a number of the whole batch."""

    def forward(self, values: Any, scale: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(values["x"] + values["noise"][0].to(values["x"].dtype)) * scale


def test_nested_inputs(plan: Plan) -> None:
    """A tensor without a gradient among them, one that is split, and one that every microbatch gets."""

    def layers() -> nn.Sequential:
        torch.manual_seed(2)
        return nn.Sequential(Joined(WIDTH, WIDTH), *rest())

    inputs, targets = batch()
    whole = torch.tensor(1.5)
    found: list[Any] = []
    for is_pipelined in (False, True):
        module, scale, made = layers(), whole.clone().requires_grad_(), outer()
        given = ({"x": made(inputs), "noise": [torch.ones(ROWS, WIDTH, dtype=torch.int64)]}, scale)
        if is_pipelined:
            with zbv.Pipeline(plan, module, nnf.mse_loss) as pipe:
                pipe.step(given, targets)
        else:
            train_plainly(module[1:], nnf.mse_loss, (module[0](*given), targets))
        found.append([gradients(made), scale.grad, gradients(module)])
    torch.testing.assert_close(found[1], found[0])


def test_microbatches_with_one_graph_and_with_their_own(plan: Plan) -> None:
    inputs, targets = batch()
    plain, shared, single = outer(), outer(), outer()
    train_plainly(model(), nnf.mse_loss, (plain(inputs), targets))
    parts = [*zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True)]
    with zbv.Pipeline(plan, model(), nnf.mse_loss) as pipe:
        made = shared(inputs).chunk(MICROBATCHES)
        pipe.step(microbatches=[(one, target) for one, (_, target) in zip(made, parts, strict=True)])
        pipe.step(microbatches=[(single(one), target) for one, target in parts])
    torch.testing.assert_close(gradients(shared), gradients(plain))
    torch.testing.assert_close(gradients(single), gradients(plain))


class Balanced(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        return zbv.add_auxiliary_loss(output, 0.1 * output.square().mean(), len(output))


def test_a_first_step_that_runs_twice_adds_gradients_once(plan: Plan) -> None:
    """Auxiliary losses need the weights of the loss, which only the first run finds."""
    inputs, targets = batch()

    def summed(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return (output - target).square().mean(1).sum(), len(output)

    plain, own = outer(), outer()
    torch.manual_seed(4)
    first = Balanced(WIDTH, WIDTH)
    middle = nn.Linear.forward(first, plain(inputs))
    loss = nnf.mse_loss(nn.Sequential(*rest())(middle), targets) + 0.1 * middle.square().mean()
    torch.autograd.backward(loss)
    expected: Any = first.weight.grad
    first.weight.grad = kept = torch.ones(WIDTH, WIDTH)
    with zbv.Pipeline(plan, [first, *rest()], summed) as pipe:
        pipe.step(own(inputs), targets)
    torch.testing.assert_close(gradients(own), gradients(plain))
    assert first.weight.grad is kept
    torch.testing.assert_close(kept, expected + 1)


@pytest.mark.parametrize("part", ["target", "keyword", "nested target"])
def test_targets_and_keywords_with_a_graph_are_refused(plan: Plan, part: str) -> None:
    class Scaled(nn.Linear):
        def forward(self, input: Tensor, scale: Tensor | None = None) -> Tensor:
            return super().forward(input) * (1.0 if scale is None else scale)

    inputs, targets = batch()
    leaf = targets.clone().requires_grad_()
    given: dict[str, Any] = {
        "target": {"targets": outer()(targets)},
        "keyword": {"targets": targets, "scale": leaf},
        "nested target": {"targets": {"a": [leaf]}},
    }[part]
    pipe = zbv.Pipeline(plan, [Scaled(WIDTH, WIDTH), *rest()], nnf.mse_loss)
    with pytest.raises(zbv.InvalidRun, match="target or keyword that requires a gradient"):
        pipe.step(inputs, **given)
    assert leaf.grad is None


@pytest.mark.parametrize(
    ("loss", "dtype", "zero"),
    [
        (nnf.mse_loss, torch.float32, "keep"),
        (positive, torch.float32, "in place"),
        (nnf.mse_loss, torch.bfloat16, "never"),
        (positive, torch.bfloat16, "keep"),
    ],
)
def test_gradients_stay_in_memory_of_the_user(plan: Plan, loss: Any, dtype: torch.dtype, zero: str) -> None:
    layers, reference = model().to(dtype), model()
    flat, expected = flat_gradients([*layers.parameters()]), flat_gradients([*reference.parameters()])
    tensors = gradients(layers)
    with zbv.Pipeline(plan, layers, loss) as pipe:
        for step in range(3):
            inputs, targets = batch(step)
            train_plainly(reference, loss, (inputs, targets))
            pipe.step(inputs.to(dtype), targets.to(dtype))
            assert all(now is tensors[name] for name, now in gradients(layers).items())
            tolerance = None if dtype == torch.float32 else 0.1
            torch.testing.assert_close(flat.float(), expected, rtol=tolerance, atol=tolerance)
            if zero != "never":
                expected.zero_()
                (flat.zero_ if zero == "keep" else lambda: layers.zero_grad(set_to_none=False))()


def test_gradients_with_other_strides_and_only_some_of_them(plan: Plan) -> None:
    layers, reference = model(), model()
    for parameter in layers.parameters():
        if parameter.dim() == 2:
            parameter.grad = torch.zeros(parameter.shape[::-1]).t()
    tensors = gradients(layers)
    with zbv.Pipeline(plan, layers, positive) as pipe:
        for step in range(2):
            train_plainly(reference, positive, batch(step))
            pipe.step(*batch(step))
        assert all(tensors[name] in (None, now) for name, now in gradients(layers).items())
        torch.testing.assert_close(gradients(layers), gradients(reference))


@pytest.mark.parametrize(
    ("dtype", "of_gradient"),
    [(torch.bfloat16, torch.float32), (torch.bfloat16, None), (torch.float32, torch.bfloat16)],
)
def test_the_user_may_choose_the_dtype_of_gradients(
    plan: Plan, dtype: torch.dtype, of_gradient: torch.dtype | None
) -> None:
    inputs, targets = (each.to(dtype) for each in batch())
    reference, layers = model().to(dtype), model().to(dtype)
    for parameter in (*reference.parameters(), *layers.parameters()):
        parameter.grad_dtype = of_gradient
    with zbv.Pipeline(plan, layers, nnf.mse_loss) as pipe:
        for _ in range(2):
            train_plainly(reference, nnf.mse_loss, (inputs, targets))
            pipe.step(inputs, targets)
    torch.testing.assert_close(gradients(layers), gradients(reference), rtol=3e-2, atol=3e-2)


def test_modes_without_gradients_leave_nothing_behind(plan: Plan) -> None:
    """Evaluations and whole pipelines in inference mode, then training with batches that were made in it."""
    reference = model()
    with torch.inference_mode():
        inputs, targets = batch()
        pipe = zbv.Pipeline(plan, [partial(lambda at: model()[at], at) for at in range(4)], nnf.mse_loss)
        first = pipe.evaluate(inputs, targets)
        state = pipe.full_state_dict()
        assert state is not None
        pipe.load_state_dict(reference.state_dict())
    train_plainly(reference, nnf.mse_loss, (inputs.clone(), targets.clone()))
    with pipe:
        for context in (torch.inference_mode, torch.no_grad):
            with context():
                torch.testing.assert_close(pipe.evaluate(inputs, targets), first)
        loss = pipe.step(inputs, targets)
        assert not loss.is_inference()
        torch.testing.assert_close(loss, first)
        torch.testing.assert_close(gradients(pipe), gradients(reference))
        with torch.inference_mode():
            pipe.clip_grad_norm_(1.0)
        pipe.step(inputs, targets)


def test_parameters_made_in_inference_mode_are_refused(plan: Plan) -> None:
    with torch.inference_mode():
        layers = model()
    pipe = zbv.Pipeline(plan, layers, nnf.mse_loss)
    expected = nnf.mse_loss(model()(batch()[0]), batch()[1]).detach()
    torch.testing.assert_close(pipe.evaluate(*batch()), expected)
    with pytest.raises(zbv.InvalidRun, match=r"made in torch\.inference_mode"):
        pipe.step(*batch())
