"""A rank of programs about losses, inputs and gradients of several ranks, compared with one process.

Under torchrun's environment: ``python -m support.loss_rank FOLDER``. Two ranks are a pipeline, four are two
replicas of one. The folder gets what the rank saw.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zbv_worker as zbv
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as nnf

from support.plans import searched, unit_problem
from support.small_pipeline import ROWS, WIDTH, flat_gradients, model
from support.small_pipeline import batch as small_batch

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
MICROBATCHES = 4
Found = dict[str, Any]
PLANS = {kind: searched(unit_problem(2, MICROBATCHES, kind)) for kind in ("v", "single")}


class Scaled(nn.Module):
    """A loss with a temperature, and perhaps the weight of a layer."""

    def __init__(self, layer: nn.Linear | None = None):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.weight = None if layer is None else layer.weight

    def forward(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        rows = target[:, 0] > 0
        output = output if self.weight is None else nnf.linear(output, self.weight)
        return (self.scale * output - target).square().sum(1)[rows].sum(), rows.sum()


def outer() -> nn.Linear:
    torch.manual_seed(7)
    return nn.Linear(WIDTH, WIDTH)


def whole_batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    return small_batch(seed, ROWS * WORLD // 2)


def batch(mesh: DeviceMesh | None, seed: int = 1) -> tuple[Tensor, Tensor]:
    """This replica's part."""
    replica = 0 if mesh is None else mesh["dp"].get_local_rank()
    inputs, targets = whole_batch(seed)
    return torch.split(inputs, ROWS)[replica], torch.split(targets, ROWS)[replica]


def mean(loss: nn.Module, output: Tensor, target: Tensor) -> Tensor:
    total, weight = loss(output, target)
    return total / weight  # type: ignore[no-any-return]  # tensors


def apart(pipe: zbv.Pipeline, *references: tuple[str, nn.Module]) -> float:
    """The largest difference between a gradient of this rank and the one of plain autograd."""
    expected = {f"{prefix}{n}": p.grad for prefix, module in references for n, p in module.named_parameters()}
    differences = [0.0]
    for name, parameter in pipe.named_parameters():
        own, other = parameter.grad, expected[name]
        assert own is not None, name
        assert other is not None, name
        differences.append(float((own - other).abs().max()))
    return max(differences)


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def loss_parameters(kind: str, mesh: DeviceMesh | None, *, is_tied: bool) -> Found:
    """Two steps, after an evaluation in inference mode; gradients in one buffer of the user."""
    reference, layers = model(), model()
    plain, loss = (Scaled(module[0] if is_tied else None) for module in (reference, layers))  # type: ignore[arg-type]
    with zbv.Pipeline(PLANS[kind], layers, loss, mesh=mesh, backend="gloo", timeout=60) as pipe:
        with torch.inference_mode():
            pipe.evaluate(*batch(mesh))
        parameters = [*pipe.parameters()]
        flat = flat_gradients(parameters)
        tensors = [parameter.grad for parameter in parameters]
        for seed in (1, 2):
            inputs, targets = whole_batch(seed)
            torch.autograd.backward(mean(plain, reference(inputs), targets))
            pipe.step(*batch(mesh, seed))
        found = apart(pipe, ("loss.", plain), ("", reference))
        kept = all(p.grad is tensor for p, tensor in zip(parameters, tensors, strict=True))
        state = pipe.full_state_dict()
        norm = float(pipe.clip_grad_norm_(1e9))
        named = dict(pipe.named_parameters())
        together = {id(p): p.grad for p in [*reference.parameters(), *plain.parameters()]}.values()
        expected = float(torch.stack([g.square().sum() for g in together if g is not None]).sum().sqrt())
        return Found(
            apart=found,
            kept=kept,
            flat=bool(flat.any()),
            norm=abs(norm - expected),
            names=[name for name in named if name.startswith("loss.")],
            state=None if state is None else sorted(set(state) - set(reference.state_dict())),
            loss_grad=loss.scale.grad is not None,
        )


def kept_ties(mesh: DeviceMesh | None) -> Found:
    """A weight on both ranks, whose gradients the user keeps."""
    reference, layers = model(), model()
    for module in (reference, layers):
        module[3].weight = module[0].weight
    with zbv.Pipeline(PLANS["single"], layers, nnf.mse_loss, mesh=mesh, backend="gloo", timeout=60) as pipe:
        own = {name: torch.ones_like(p) for name, p in pipe.named_parameters()}
        for name, parameter in pipe.named_parameters():
            parameter.grad = own[name]
        for parameter in reference.parameters():
            parameter.grad = torch.ones_like(parameter)
        for seed in (1, 2):
            inputs, targets = whole_batch(seed)
            torch.autograd.backward(nnf.mse_loss(reference(inputs), targets))
            pipe.step(*batch(mesh, seed))
        reference[3].weight.grad = reference[0].weight.grad
        expected = {n: p.grad for n, p in reference.named_parameters(remove_duplicate=False)}
        differences = [float((own[n] - expected[n]).abs().max()) for n in own]  # type: ignore[operator]
        return Found(apart=max(differences), kept=all(p.grad is own[n] for n, p in pipe.named_parameters()))


def outer_inputs(mesh: DeviceMesh | None) -> Found:
    """Only the rank with the first layer passes inputs with a graph; then another rank does too."""
    found = Found()
    plain, own = outer(), outer()
    inputs, targets = whole_batch()
    torch.autograd.backward(mean(Scaled(), model()(plain(inputs)), targets))
    pipe = zbv.Pipeline(PLANS["single"], model(), Scaled(), mesh=mesh, backend="gloo", timeout=60)
    mine, goals = batch(mesh)
    pipe.step(own(mine) if 0 in pipe.modules else None, goals)
    gradient, expected = own.weight.grad, plain.weight.grad
    if 0 in pipe.modules:
        assert gradient is not None
        assert expected is not None
        if mesh is not None:  # every replica has the part of its batch
            dist.all_reduce(gradient, group=mesh["dp"].get_group())
        found["apart"] = float((gradient - expected).abs().max())
    else:
        found["apart"] = 0.0 if gradient is None else 1.0
    found["everywhere"] = error_of(lambda: pipe.step(own(mine), goals))
    return found


def outer_inputs_of_one_rank() -> Found:
    found = Found()
    plain = outer()
    inputs, targets = whole_batch()
    torch.autograd.backward(nnf.mse_loss(model()(plain(inputs)), targets))
    for source in (0, 1):
        own = outer()
        with zbv.Pipeline(
            PLANS["single"], model(), nnf.mse_loss, data_rank=source, backend="gloo", timeout=60
        ) as pipe:
            given = (own(inputs), targets) if source == RANK else ()
            found[f"from {source}"] = error_of(partial(pipe.step, *given))
            if source == 0 == RANK:
                gradient, expected = own.weight.grad, plain.weight.grad
                assert gradient is not None
                assert expected is not None
                found["apart"] = float((gradient - expected).abs().max())
            found[f"usable {source}"] = error_of(partial(pipe.step, *(each.detach() for each in given)))
    return found


def refused() -> Found:
    """Errors that every rank must raise, at once."""
    pairs = batch(None)

    def step(loss: Any, layers: nn.Module | None = None, **more: Any) -> str:
        pipe = zbv.Pipeline(PLANS["single"], layers or model(), loss, backend="gloo", timeout=60)
        return error_of(lambda: pipe.step(*pairs, **more))

    def searched() -> None:
        with zbv.Pipeline(PLANS["v"], model(), nnf.mse_loss, backend="gloo", timeout=60) as pipe:
            optimizer = torch.optim.AdamW(pipe.parameters())
            optimizer.step(lambda: pipe.step(*pairs))
            torch.optim.LBFGS(pipe.parameters()).step(lambda: pipe.step(*pairs))  # type: ignore[no-untyped-call]

    layers = model()
    weight = layers.get_parameter("0.weight")
    return Found(
        no_graph=step(lambda output, target: nnf.mse_loss(output, target).detach()),
        frozen=step(nnf.mse_loss, model().requires_grad_(False)),
        elsewhere=step(lambda output, target: nnf.mse_loss(nnf.linear(output, weight), target), layers),
        searched=error_of(searched),
    )


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")) if WORLD == 4 else None
    found = {
        "v": loss_parameters("v", mesh, is_tied=False),
        "single": loss_parameters("single", mesh, is_tied=False),
        "tied v": loss_parameters("v", mesh, is_tied=True),
        "tied single": loss_parameters("single", mesh, is_tied=True),
        "ties": kept_ties(mesh),
        "outer": outer_inputs(mesh),
    }
    if mesh is None:
        found |= {"data rank": outer_inputs_of_one_rank(), "refused": refused()}
    (folder / f"rank-{RANK}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
