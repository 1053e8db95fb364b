"""Losses with parameters, inputs with a graph and the user's gradients on several ranks and replicas."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.gradients import require_gradients, train_plainly
from support.small_pipeline import ROWS, WIDTH, batch, flat_gradients, model
from support.thread_pipeline import on_ranks, plan_of, rank_of, returned
from torch import Tensor, nn
from torch.nn import functional as nnf
from torch.optim.optimizer import register_optimizer_step_pre_hook
from zbv_worker import Pipeline

RANKS = 2
each_placement = pytest.mark.parametrize("placement", ["v", "single"])
each_count = pytest.mark.parametrize("replicas", [1, 2])
WRONG_PLACE = "inputs that require a gradient on a rank without the first layer"


class Scaled(nn.Module):
    """A loss with a temperature, and perhaps the weight of a layer."""

    def __init__(self, layer: Any = None):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.weight = None if layer is None else layer.weight

    def forward(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        rows = target[:, 0] > 0
        output = output if self.weight is None else nnf.linear(output, self.weight)
        return (self.scale * output - target).square().sum(1)[rows].sum(), rows.sum()


def run(kind: str, program: Callable[[Pipeline], Any], loss: Any = nnf.mse_loss, **more: Any) -> list[Any]:
    """What a program returns or raises on every rank."""
    return on_ranks(plan_of(RANKS, kind), more.pop("layers", model), loss, program, **more)


def part(pipe: Pipeline, seed: int = 1) -> tuple[Tensor, Tensor]:
    """This replica's part of the whole batch."""
    transport: Any = pipe._transport
    count = transport.layout.replicas
    inputs, targets = batch(seed, ROWS * count)
    return inputs.chunk(count)[transport.replica], targets.chunk(count)[transport.replica]


def train_alone(layers: nn.Module, loss: Callable[..., Any], replicas: int) -> None:
    """Two steps of plain autograd on the whole batches."""
    train_plainly(layers, loss, *(batch(seed, ROWS * replicas) for seed in (1, 2)))


@each_placement
@each_count
@pytest.mark.parametrize("is_tied", [False, True])
def test_parameters_of_a_loss_are_those_of_the_rank_with_the_last_layer(
    placement: str, replicas: int, *, is_tied: bool
) -> None:
    """After an evaluation in inference mode; all gradients are parts of one buffer of the user."""
    reference, losses = model(), list[Scaled]()
    plain = Scaled(reference[0] if is_tied else None)
    train_alone(reference, plain, replicas)
    together = nn.Sequential(reference, plain)
    norm = nn.utils.get_total_norm([p.grad for p in together.parameters() if p.grad is not None])

    def loss_of(layers: Any) -> Scaled:
        losses.append(Scaled(layers[0] if is_tied else None))
        return losses[-1]

    def program(pipe: Pipeline) -> tuple[set[str], Any]:
        with torch.inference_mode():
            pipe.evaluate(*part(pipe))
        parameters = [*pipe.parameters()]
        flat = flat_gradients(parameters)
        tensors = [parameter.grad for parameter in parameters]
        for seed in (1, 2):
            pipe.step(*part(pipe, seed))
        require_gradients(pipe, reference, rtol=1e-4, atol=1e-5)
        require_gradients(pipe, nn.ModuleDict({"loss": plain}), rtol=1e-4, atol=1e-5)
        assert all(p.grad is tensor for p, tensor in zip(parameters, tensors, strict=True))
        assert flat.any()
        torch.testing.assert_close(pipe.clip_grad_norm_(1e9), norm)
        own = {name for name, _ in pipe.named_parameters() if name.startswith("loss.")}
        return own, pipe.full_state_dict()

    found = returned(run(placement, program, loss_of=loss_of, replicas=replicas))
    last = range(replicas) if placement == "v" else range(replicas, 2 * replicas)
    for rank, (names, _) in enumerate(found):
        assert ("loss.scale" in names) == (rank in last)
        assert (losses[rank].scale.grad is not None) == (rank in last)  # another rank's copy is not touched
    more = ["loss.scale", *["loss.weight"] * is_tied]
    assert sorted(set(found[0][1]) - set(reference.state_dict())) == more


@each_count
def test_gradients_of_a_weight_on_both_ranks_stay_in_the_memory_of_the_user(replicas: int) -> None:
    def tied() -> nn.Sequential:
        layers = model()
        layers[3].weight = layers[0].weight
        return layers

    reference = tied()
    for parameter in reference.parameters():
        parameter.grad = torch.ones_like(parameter)
    train_alone(reference, nnf.mse_loss, replicas)

    def program(pipe: Pipeline) -> None:
        own = {name: torch.ones_like(p) for name, p in pipe.named_parameters()}
        for name, parameter in pipe.named_parameters():
            parameter.grad = own[name]
        for seed in (1, 2):
            pipe.step(*part(pipe, seed))
        require_gradients(pipe, reference, rtol=1e-4, atol=1e-5)
        assert all(parameter.grad is own[name] for name, parameter in pipe.named_parameters())

    returned(run("single", program, layers=tied, replicas=replicas))


@each_count
def test_inputs_with_a_graph_get_their_gradient_on_the_rank_with_the_first_layer(replicas: int) -> None:
    """Of every replica that of its part of the batch. Another rank may not have such inputs."""
    plain = nn.Linear(WIDTH, WIDTH)
    outer = [copy.deepcopy(plain) for _ in range(RANKS * replicas)]
    inputs, targets = batch(1, ROWS * replicas)
    train_plainly(model(), Scaled(), (plain(inputs), targets))

    def program(pipe: Pipeline) -> Tensor | None:
        own, (mine, goals) = outer[rank_of(pipe)], part(pipe)
        pipe.step(own(mine) if 0 in pipe.modules else None, goals)
        gradient = own.weight.grad
        return None if gradient is None else gradient.clone()

    gradients = returned(run("single", program, loss_of=lambda layers: Scaled(), replicas=replicas))
    assert gradients[replicas:] == [None] * replicas
    torch.testing.assert_close(torch.stack(gradients[:replicas]).sum(0), plain.weight.grad)

    def everywhere(pipe: Pipeline) -> None:
        pipe.step(plain(part(pipe)[0]), part(pipe)[1])

    assert all(WRONG_PLACE in str(each) for each in run("single", everywhere, replicas=replicas))


def test_inputs_of_the_data_rank_get_their_gradient_if_it_has_the_first_layer() -> None:
    """If it has not, the pipeline stays usable."""
    plain, own = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
    own.load_state_dict(plain.state_dict())
    inputs, targets = batch()
    train_plainly(model(), nnf.mse_loss, (plain(inputs), targets))
    for source in range(RANKS):

        def program(pipe: Pipeline, source: int = source) -> None:
            given = (own(inputs), targets) if rank_of(pipe) == source else ()
            if source:
                with pytest.raises(Exception, match=WRONG_PLACE):
                    pipe.step(*given)
            else:
                pipe.step(*given)
            pipe.step(*(each.detach() for each in given))

        returned(run("single", program, data_rank=source))
    torch.testing.assert_close(own.weight.grad, plain.weight.grad)


def detached(output: Tensor, target: Tensor) -> Tensor:
    return nnf.mse_loss(output, target).detach()


def of_another_rank(layers: Any) -> Callable[[Tensor, Tensor], Tensor]:
    weight = layers[0].weight
    return lambda output, target: nnf.mse_loss(nnf.linear(output, weight), target)


@pytest.mark.parametrize(
    ("message", "more"),
    [
        ("does not depend on anything that requires a gradient", {"loss": detached}),
        ("found no parameter that requires a gradient", {"layers": lambda: model().requires_grad_(False)}),
        (r"uses a trainable tensor of shape [4, 4]", {"loss_of": of_another_rank}),
    ],
)
def test_every_rank_hears_why_a_step_cannot_train(message: str, more: dict[str, Any]) -> None:
    found = run("single", lambda pipe: pipe.step(*batch()), **more)
    assert all(message in str(each) for each in found)


def test_an_optimizer_may_take_one_step_in_its_closure_and_not_several() -> None:
    def program(pipe: Pipeline) -> None:
        torch.optim.AdamW(pipe.parameters()).step(lambda: pipe.step(*batch()))
        torch.optim.LBFGS(pipe.parameters()).step(lambda: pipe.step(*batch()))  # type: ignore[no-untyped-call]

    assert all("found LBFGS" in str(each) for each in run("v", program))


def test_pipelines_come_and_go_during_an_optimizers_step() -> None:
    """Of any optimizer of the process: torch reads its hooks meanwhile."""

    def others(*_: object) -> None:
        returned(run("v", lambda pipe: None))

    hooks = [register_optimizer_step_pre_hook(each) for each in (others, lambda *_: None)]
    try:
        torch.optim.SGD([nn.Parameter(torch.ones(1))]).step()
    finally:
        for hook in hooks:
            hook.remove()
