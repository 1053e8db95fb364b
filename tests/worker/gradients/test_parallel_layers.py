"""Tensor parallelism, FSDP and ties across ranks train like one process."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as nnf
from support.cut_models import cut_problem
from support.rank_files import found_by
from support.selfcheck import random_orders
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
from zbv_worker.checkpoints.checkpoint import CheckpointOptions, newest_checkpoint
from zbv_worker.checkpoints.checkpoint_files import Reader
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.model.spec import ModelSpec
from zbv_worker.pipeline.state import gather_state, load_state
from zbv_worker.run.options import RunOptions, TrainingOptions
from zbv_worker.run.run import train
from zbv_worker.stage.distributed_grads import add_linear_gradients
from zbv_worker.transport.connect import connect
from zbv_worker.transport.world import Layout, World

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

    def forward(self, x: Tensor) -> Any:
        return x + self.down(nnf.gelu(self.up(self.norm(x))))


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
    return fully_shard(module, mesh=mesh["dp"])  # type: ignore[return-value]  # the same module


def hybrid(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(module, mesh=mesh["dp_replicate", "dp_shard"])  # type: ignore[return-value]


def both(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
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
    named = parameters.items()
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in named}


def counting(calls: Counter[str]) -> Any:
    """Count the products of local parts in W, and those that did not suffice."""

    def counted(*arguments: Any) -> bool:
        is_done = add_linear_gradients(*arguments)
        calls["local" if is_done else "not local"] += 1
        return is_done

    return patch("zbv_worker.stage.distributed_grads.add_linear_gradients", counted)


def of_rank(folder: Path) -> dict[str, Any]:
    dist.init_process_group("gloo")
    found = {}
    for name, case in CASES.items():
        print(name, flush=True)  # noqa: T201 - a rank's log
        found[name] = trained(case, folder / name if name in SAVED else None)
    dist.barrier()
    dist.destroy_process_group()
    return found


RANKS = range(4)
Found = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parallel")


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    """By rank and case."""
    return found_by("worker.gradients.test_parallel_layers", len(RANKS), folder)


@cache
def alone(microbatches: int, clip_norm: float, *, is_tied: bool) -> dict[str, Any]:
    """The same training in one process, by torch alone."""
    model = Model(Case({}, is_tied=is_tied), None)
    module = model.build_layers(NAMES, CPU)
    if is_tied:
        module.get_submodule("head.logits").weight = module.get_parameter("embedding.token.weight")
    optimizer = model.optimizer(module.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        pairs = (model.microbatch(step, index) for index in range(microbatches))
        mean = torch.stack([model.loss(module(x), y) for x, y in pairs]).mean()
        mean.backward()  # type: ignore[no-untyped-call]  # torch's own
        losses.append(mean.item())
        norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), clip_norm).item())
        optimizer.step()
    parameters = {n: p.detach() for n, p in module.named_parameters(remove_duplicate=False)}
    return {"losses": losses, "norms": norms, "parameters": parameters}


def expected(case: str) -> dict[str, Any]:
    its = CASES[case]
    return alone(MICROBATCHES * its.replicas, its.clip_norm, is_tied=its.is_tied)


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_one_process(found: Found, case: str) -> None:
    reported = [found[rank][case]["losses"] for rank in RANKS if None not in found[rank][case]["losses"]]
    assert reported
    for losses in reported:
        assert losses == pytest.approx(expected(case)["losses"], rel=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_every_element_counts_once_in_the_norm(found: Found, case: str) -> None:
    for rank in RANKS:
        assert found[rank][case]["norms"] == pytest.approx(expected(case)["norms"], rel=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_those_of_one_process(found: Found, case: str) -> None:
    """After SGD, so an error of a gradient shows."""
    wanted: dict[str, Tensor] = expected(case)["parameters"]
    seen = set()
    for rank in RANKS:
        for name, value in found[rank][case]["parameters"].items():
            seen.add(name)
            torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6)
    assert seen >= set(wanted) - {"head.logits.weight"}


@pytest.mark.parametrize("case", CASES)
def test_the_state_of_divided_layers_is_gathered_and_loaded(found: Found, case: str) -> None:
    whole = found[0][case]["whole"]
    parameters = {n: p for rank in RANKS for n, p in found[rank][case]["parameters"].items()}
    torch.testing.assert_close(whole, parameters, rtol=0, atol=0)
    for rank in RANKS:
        assert found[rank][case]["negative"]
        assert rank == 0 or found[rank][case]["whole"] is None


@pytest.mark.parametrize("case", ["sp, mesh turned", "fsdp and tp", "tp, recomputed"])
def test_w_multiplies_only_local_parts(found: Found, case: str) -> None:
    for rank in RANKS:
        calls = found[rank][case]["calls"]
        assert calls["local"] > 0
        assert "not local" not in calls
        assert not any("Linear" in name for some in found[rank][case]["unsplit"] for name in some)


@pytest.mark.parametrize("case", ["fsdp, tied", "hsdp", "fsdp and tp"])
def test_replicas_keep_a_part_of_every_parameter(found: Found, case: str) -> None:
    parts = 4 if case == "fsdp and tp" else 2
    whole = expected(case)["parameters"]
    for rank in RANKS:
        kept = found[rank][case]["kept"].get("block1.up.weight")
        assert kept in (None, whole["block1.up.weight"].numel() / parts)


@pytest.mark.parametrize("case", CASES)
def test_evaluations_use_the_current_parameters(found: Found, case: str) -> None:
    """The first evaluation uses the first step's microbatches."""
    evaluations = [found[rank][case]["evaluations"] for rank in RANKS if found[rank][case]["evaluations"]]
    assert evaluations
    for each in evaluations:
        assert each[0] == pytest.approx(expected(case)["losses"][0], rel=1e-5)
        assert all(map(math.isfinite, each.values()))


@pytest.mark.parametrize("case", SAVED)
def test_a_mesh_resumes_from_its_checkpoint(found: Found, case: str) -> None:
    for rank in RANKS:
        parameters, steps = found[rank][case]["resumed"]
        assert steps == 0
        for name, value in parameters.items():
            assert torch.equal(value, found[rank][case]["parameters"][name])


@pytest.mark.parametrize("case", SAVED)
def test_one_process_reads_the_checkpoint_of_a_mesh(found: Found, folder: Path, case: str) -> None:
    """Every element is in it once: the reader refuses to fill one twice."""
    saved: Any = newest_checkpoint(folder / case)
    parameters = expected(case)["parameters"]
    tied = {"head.logits.weight"} if CASES[case].is_tied else set()
    read = {f"model.{n}": torch.zeros_like(p) for n, p in parameters.items() if n not in tied}
    Reader(saved).read_into(read)
    for name, value in read.items():
        torch.testing.assert_close(value, parameters[name.removeprefix("model.")], rtol=1e-5, atol=1e-6)
