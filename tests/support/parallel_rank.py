"""A rank that trains a model with several kinds of parallelism, and writes down losses and parameters.

A program of :mod:`support.rank_files` for four ranks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from zbv_solver.problem.problem import Problem
from zbv_worker.checkpoints.checkpoint import CheckpointOptions
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.model.spec import ModelSpec
from zbv_worker.pipeline.state import gather_state, load_state
from zbv_worker.run.options import RunOptions, TrainingOptions
from zbv_worker.run.run import train
from zbv_worker.stage.distributed_grads import add_linear_gradients
from zbv_worker.transport.connect import connect
from zbv_worker.transport.world import Layout, World

from support.cut_models import cut_problem
from support.selfcheck import random_orders

TIMEOUT = 60.0
CPU = torch.device("cpu")
STEPS = 2
MICROBATCHES = 2
WIDTH, WORDS, LENGTH = 8, 12, 6
NAMES = ("embedding", "block0", "block1", "block2", "head")

Apply = Callable[[nn.Module, DeviceMesh], nn.Module]


class Block(nn.Module):
    """A residual block with a norm and two Linears."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width), same shape."""
        found: Tensor = x + self.down(nnf.gelu(self.up(self.norm(x))))
        return found


def layer(name: str) -> nn.Module:
    """A layer; its parameters depend only on its name."""
    torch.manual_seed(sum(map(ord, name)))
    if name == "embedding":
        return nn.Sequential(OrderedDict(token=nn.Embedding(WORDS, WIDTH)))
    if name == "head":
        return nn.Sequential(OrderedDict(logits=nn.Linear(WIDTH, WORDS, bias=False)))
    return Block()


class Model:
    """The layers, parallelised as a case says."""

    def __init__(self, case: Case, mesh: DeviceMesh | None):
        self._case = case
        self._mesh = mesh
        self.built: list[nn.Sequential] = []

    def layer_names(self) -> Sequence[str]:
        return NAMES

    def build_layers(self, names: Sequence[str], device: torch.device) -> nn.Sequential:
        found = nn.Sequential()
        for name in names:
            made = layer(name).to(self._case.dtype)
            found.add_module(name, made if self._mesh is None else self._case.apply(made, self._mesh))
        self.built.append(found)
        return found

    def build_stage(self, stage: int, n_stages: int, device: torch.device) -> nn.Module:
        raise NotImplementedError

    def tied_parameters(self) -> Sequence[tuple[str, str]]:
        return [("embedding.token.weight", "head.logits.weight")] if self._case.is_tied else []

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(1000 * step + index)
        tokens = torch.randint(WORDS, (2, LENGTH + 1), generator=random)
        return tokens[:, :-1], tokens[:, 1:]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nnf.cross_entropy(output.flatten(0, 1).float(), target.flatten())

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)


def plain(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """No parallelism inside the rank."""
    return module


def divided(module: nn.Module, mesh: DeviceMesh, **styles: ParallelStyle) -> nn.Module:
    """A layer whose modules are divided in these ways, as far as it has them."""
    own = {name: style for name, style in styles.items() if hasattr(module, name)}
    return parallelize_module(module, mesh["tp"], own)


def tensor_parallel(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Linears divided by columns and by rows."""
    return divided(
        module,
        mesh,
        token=RowwiseParallel(input_layouts=Replicate()),
        up=ColwiseParallel(),
        down=RowwiseParallel(),
        logits=ColwiseParallel(output_layouts=Replicate()),
    )


def sequence_parallel(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Also the norms divided along the sequence; a stage passes on a part of the sequence."""
    part = Shard(1)
    return divided(
        module,
        mesh,
        token=RowwiseParallel(input_layouts=Replicate(), output_layouts=part),
        norm=SequenceParallel(use_local_output=True),
        up=ColwiseParallel(input_layouts=part),
        down=RowwiseParallel(output_layouts=part),
        logits=ColwiseParallel(input_layouts=part, output_layouts=Replicate()),
    )


def sharded(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """FSDP over the replicas."""
    return fully_shard(module, mesh=mesh["dp"])  # type: ignore[return-value]  # the same module


def hybrid(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """HSDP over two dimensions."""
    return fully_shard(module, mesh=mesh["dp_replicate", "dp_shard"])  # type: ignore[return-value]


def both(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Tensor parallelism and FSDP."""
    return sharded(tensor_parallel(module, mesh), mesh)


@dataclass(frozen=True)
class Case:
    """A mesh, what is applied to the layers, and the plan's placement."""

    mesh: dict[str, int]
    apply: Apply = plain
    sizes: tuple[int, ...] = (1, 1, 1, 2)
    placement: str = "v"
    is_tied: bool = False
    recompute: tuple[bool, ...] = ()
    dtype: torch.dtype = torch.float32
    clip_norm: float = 0.05

    @property
    def problem(self) -> Problem:
        return cut_problem(NAMES, self.sizes, self.recompute, MICROBATCHES, self.placement)

    @property
    def replicas(self) -> int:
        found = 1
        for name, size in self.mesh.items():
            found *= size if name.startswith("dp") else 1
        return found


SINGLE: Any = {"sizes": (2, 3), "placement": "single"}
CASES: dict[str, Case] = {
    "sp, mesh turned": Case({"tp": 2, "pp": 2}, sequence_parallel),
    "tp, recomputed": Case({"pp": 2, "tp": 2}, tensor_parallel, recompute=(True, False, True, True)),
    "tp, tied": Case({"pp": 2, "tp": 2}, tensor_parallel, is_tied=True, **SINGLE),
    "dp and tp": Case({"dp": 2, "pp": 1, "tp": 2}, tensor_parallel, sizes=(2, 3)),
    "fsdp, tied": Case({"pp": 2, "dp": 2}, sharded, is_tied=True),
    "fsdp and tp": Case({"pp": 1, "dp": 2, "tp": 2}, both, sizes=(2, 3)),
    "hsdp": Case({"pp": 1, "dp_replicate": 2, "dp_shard": 2}, hybrid, sizes=(2, 3)),
    "tied, replicas": Case({"pp": 2, "dp": 2}, is_tied=True, **SINGLE),
}


SAVED = ("tp, tied", "fsdp and tp", "hsdp")
"""Cases that save a checkpoint, and resume from it."""


def trained(case: Case, saved: Path | None) -> dict[str, Any]:
    """Losses, norms and parameters of a run on the whole mesh, and parameters after resuming."""
    mesh = init_device_mesh("cpu", tuple(case.mesh.values()), mesh_dim_names=tuple(case.mesh))
    world = World.current()
    layout = Layout.of_mesh(mesh.mesh_dim_names, mesh.mesh, world.world_size)
    transport = connect(world, "gloo", CPU, TIMEOUT, layout)
    orders = random_orders(case.problem, Random(7), 0.3)
    plan = RankPlan.of("0" * 64, case.problem, orders, transport.pp_rank)
    model, calls = Model(case, mesh), Counter[str]()
    checkpoint = None if saved is None else CheckpointOptions(saved, every=STEPS, timeout=TIMEOUT)
    options = TrainingOptions(
        replicas=case.replicas, clip_norm=case.clip_norm, evaluate_every=STEPS, checkpoint=checkpoint
    )
    run = RunOptions((), ModelSpec("tests:model"), STEPS, timeout=TIMEOUT, training=options)
    with counting(calls):
        (report,) = train(run, [plan], model, transport, CPU)
    named = parameters_of(model)
    found: dict[str, Any] = {
        "losses": [line.loss for line in report.lines],
        "norms": [line.updated.gradient_norm for line in report.lines],
        "evaluations": report.evaluations,
        "parameters": whole(named),
        "kept": {n: (p.to_local() if isinstance(p, DTensor) else p).numel() for n, p in named.items()},
        "unsplit": [event["modules"] for event in report.events if event["kind"] == "little_to_split"],
        "calls": dict(calls),
    }
    if saved is not None:
        again = Model(case, mesh)
        (resumed,) = train(run, [plan], again, transport, CPU)  # has no step left
        found["resumed"] = whole(parameters_of(again)), len(resumed.lines)
    found["whole"] = gather_state(dict(enumerate(model.built)), transport, TIMEOUT)
    load_state(dict(enumerate(model.built)), {n: -tensor for n, tensor in found["parameters"].items()}, {})
    found["negative"] = all(torch.equal(t, -found["parameters"][n]) for n, t in whole(named).items())
    transport.barrier(TIMEOUT)
    transport.close()
    return found


def parameters_of(model: Model) -> dict[str, Tensor]:
    return {n: p for module in model.built for n, p in module.named_parameters()}


def whole(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """The whole of divided parameters. Collective."""
    return {
        n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in parameters.items()
    }


def counting(calls: Counter[str]) -> Any:
    """Count the products of local parts in W, and those that did not suffice."""

    def counted(*arguments: Any) -> bool:
        is_done = add_linear_gradients(*arguments)
        calls["local" if is_done else "not local"] += 1
        return is_done

    return patch("zbv_worker.stage.distributed_grads.add_linear_gradients", counted)


def found(folder: Path) -> dict[str, Any]:
    """What this rank saw, by case."""
    dist.init_process_group("gloo")
    found = {}
    for name, case in CASES.items():
        print(name, flush=True)  # noqa: T201 - a rank's log
        found[name] = trained(case, folder / name if name in SAVED else None)
    dist.barrier()
    dist.destroy_process_group()
    return found
