"""Sharded replicas train like unsharded ones; what ``fully_shard`` must have for a pipeline."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cut_models import cut_problem
from support.orders import copied_at_random
from support.rank_files import found_by
from support.selfcheck import random_orders
from support.thread_transport import ThreadHub
from support.trained import Remembering
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import Problem
from zbv_worker.errors import InvalidRun
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.gradients.buckets import gradients_of
from zbv_worker.gradients.fully_sharded import FullySharded, divide, dividing
from zbv_worker.model.spec import ModelSpec
from zbv_worker.models.gpt import GPT, GptConfig
from zbv_worker.run.options import RunOptions, TrainingOptions
from zbv_worker.run.run import train
from zbv_worker.stage.dtensors import is_dtensor
from zbv_worker.transport.gloo import GlooTransport
from zbv_worker.transport.gloo_control import GlooControl
from zbv_worker.transport.world import Layout, World

TIMEOUT = 60.0
RECOMPUTED = (True, False, True, False)


class Small(GPT):
    """A GPT of four blocks, with plain SGD: Adam would magnify differences of rounding."""

    def __init__(self, *, tied: bool = False, dtype: torch.dtype = torch.float32):
        super().__init__(GptConfig(4, 16, 2, 8, 2, 20_000, tied=tied), 0)
        self._dtype = dtype
        self.built: list[nn.Module] = []

    def build_layers(self, names: Sequence[str], device: torch.device) -> nn.Sequential:
        self.built.append(module := super().build_layers(names, device).to(self._dtype))
        return module

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)


class Tempered(Small):
    """With a loss that has a parameter, in a module that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.loss_module = nn.ParameterList([torch.ones(3)])

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return super().loss(output * self.loss_module[0].mean(), target)


@dataclass(frozen=True)
class Case:
    """A model and how to train it."""

    model: Callable[[], Any]
    problem: Problem
    options: dict[str, Any]
    is_copied: bool = False
    """Whether some of what F's keep is copied to the host."""

    @property
    def orders(self) -> Orders:
        orders = random_orders(self.problem, Random(7), 0.3)
        return copied_at_random(orders, Random(7)) if self.is_copied else orders


def _gpt(**cut: Any) -> Problem:
    return cut_problem(Small().layer_names(), (2, 1, 1, 2), **cut)


CASES = {
    "uneven": Case(Remembering, cut_problem(Remembering().layer_names(), (3, 2, 1, 2)), {}),
    "recomputed, mixed, accumulated": Case(
        Small,
        _gpt(recompute=RECOMPUTED),
        {"evaluate_every": 1, "precision": "bfloat16", "parts": 2},
        is_copied=True,
    ),
    "tied": Case(lambda: Small(tied=True), _gpt(), {}, is_copied=True),
    "tied over ranks": Case(
        lambda: Small(tied=True), cut_problem(Small().layer_names(), (3, 3), placement="single"), {}
    ),
    "half": Case(lambda: Small(dtype=torch.bfloat16), _gpt(), {}),
    "clipped": Case(Tempered, _gpt(), {"clip_norm": 0.1}),
}


def trained(case: Case, transport: GlooTransport, *, is_sharded: bool, steps: int = 2) -> dict[str, Any]:
    """The parameters by name, and the losses and norms of the steps."""
    plan = RankPlan.of("0" * 64, case.problem, case.orders, transport.pp_rank)
    options = TrainingOptions(replicas=2, is_sharded=is_sharded, **case.options)
    model = case.model()
    run = RunOptions((), ModelSpec("tests:model"), steps, timeout=TIMEOUT, training=options)
    (report,) = train(run, [plan], model, transport, CPU)
    named = [pair for module in model.built for pair in module.named_parameters()]
    return {
        "parameters": {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in named},
        "kept": {n: p.to_local().numel() if isinstance(p, DTensor) else p.numel() for n, p in named},
        "losses": [line.loss for line in report.lines],
        "norms": [line.updated.gradient_norm for line in report.lines],
        "evaluations": report.evaluations,
    }


def sum_of_halves(transport: GlooTransport) -> float:
    """The sum over two replicas of gradients 256, 1, 1 and 1, of a parameter in bfloat16."""
    module = nn.Sequential(nn.Linear(1, 1, bias=False, dtype=torch.bfloat16))
    dividing(transport, CPU)(module)
    gradients = gradients_of({0: module}, transport)
    gradients.begin()
    for x in (256.0, 1.0, 1.0, 1.0):
        module(torch.tensor([[x]], dtype=torch.bfloat16)).sum().backward()
    gradients.stage_done(0)
    gradients.finish(TIMEOUT)
    gradients.hand_over()
    gradient: Any = module[0].weight.grad
    return float(gradient.full_tensor())


def of_rank(folder: Path) -> dict[str, Any]:
    control = GlooControl(World.from_environment(), TIMEOUT, Layout.of_world(4, 2))
    transport = GlooTransport(control, CPU, TIMEOUT)
    found: dict[str, Any] = {
        name: {is_sharded: trained(case, transport, is_sharded=is_sharded) for is_sharded in (False, True)}
        for name, case in CASES.items()
    }
    found["sum of halves"] = sum_of_halves(transport)
    transport.barrier(TIMEOUT)
    transport.close()
    return found


CPU = torch.device("cpu")
RANKS = range(4)
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """By rank, case and whether it was sharded."""
    folder = tmp_path_factory.mktemp("sharded")
    return found_by("worker.gradients.test_sharding", len(RANKS), folder)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("case", sorted(set(CASES) - {"clipped"}))
def test_sharded_replicas_get_the_parameters_of_unsharded_ones(found: Found, case: str, rank: int) -> None:
    """Two replicas add two numbers, so even the rounding is equal.

    Tied parameters have two copies, whose gradients are added up in another order than those of one tensor.
    With parameters in half precision, ``fully_shard`` rounds the gradients of every microbatch before it adds
    them up in float32; the sums of whole gradients are not rounded. Losses are those of such parameters.
    """
    whole, sharded = found[rank][case][False], found[rank][case][True]
    tolerances = {"half": (2**-8, 3e-4), "tied": (1e-6, 1e-8), "tied over ranks": (1e-6, 1e-8)}
    rtol, atol = tolerances.get(case, (0.0, 0.0))
    for name in ("losses", "evaluations", "parameters"):
        torch.testing.assert_close(sharded[name], whole[name], rtol=rtol, atol=atol)


@pytest.mark.parametrize("rank", RANKS)
def test_the_norm_for_clipping_includes_the_parts_of_all_replicas(found: Found, rank: int) -> None:
    whole, sharded = found[rank]["clipped"][False], found[rank]["clipped"][True]
    assert sharded["norms"] == pytest.approx(whole["norms"], rel=1e-6)
    torch.testing.assert_close(sharded["parameters"], whole["parameters"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", CASES)
def test_every_element_is_kept_by_one_replica_but_for_those_of_a_loss(found: Found, case: str) -> None:
    for rank in (0, 2):  # replicas of a position are neighbours
        for name, value in found[rank][case][False]["parameters"].items():
            kept = [found[one][case][True]["kept"][name] for one in (rank, rank + 1)]
            if name.startswith("loss."):
                assert kept == [value.numel()] * 2
                continue
            assert sum(kept) == value.numel()
            assert max(kept) <= (value.shape[0] + 1) // 2 * (value.numel() // value.shape[0])


def test_gradients_in_half_precision_are_summed_in_float32(found: Found) -> None:
    """In bfloat16, 256 + 1 is 256, and the sum over the replicas would be 512."""
    assert [each["sum of halves"] for each in found] == [518.0 + 2] * 4


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """One rank."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # missing in torch's stubs
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def with_scalar() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    return module


def with_hook() -> nn.Module:
    module = nn.Linear(2, 2)
    module.weight.register_hook(torch.neg)  # type: ignore[no-untyped-call]  # torch's own
    return module


def with_two_types() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (with_scalar, r"'scale' of a Linear without dimensions; .* Give it the shape \(1,\)"),
        (with_hook, "'weight' of a Linear with a hook, .* Remove the hook"),
        (with_two_types, "bfloat16, float32 in one Sequential; .* Convert the layer"),
    ],
)
def test_a_parameter_that_cannot_be_divided_is_refused(
    group: dist.ProcessGroup, layer: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(InvalidRun, match=message):
        divide(nn.Sequential(layer()), group, CPU)


def test_one_replica_is_refused() -> None:
    with pytest.raises(InvalidRun, match=r"found one replica; .* Pass --data-parallel"):
        dividing(ThreadHub(1).transport(0), CPU)


def test_a_parameter_that_layers_of_a_stage_share_stays_whole(group: dist.ProcessGroup) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    shared = module[2].weight = module[0].weight
    divide(module, group, CPU)
    assert module[0].weight is module[2].weight is shared
    assert {name for name, each in module.named_parameters() if isinstance(each, DTensor)} == {
        "0.bias", "1.weight", "1.bias", "2.bias"
    }  # fmt: skip


def test_a_stage_with_fully_shard_stays_as_it_is(group: dist.ProcessGroup) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(module[1], mesh=DeviceMesh.from_group(group, "cpu"))
    divide(module, group, CPU)
    assert [isinstance(each, DTensor) for each in module.parameters()] == [False] * 2 + [True] * 2


def stages(group: dist.ProcessGroup) -> dict[int, nn.Module]:
    """Two stages of two layers with ``fully_shard``."""
    mesh = DeviceMesh.from_group(group, "cpu")
    layers: list[Any] = [fully_shard(nn.Linear(3, 3), mesh=mesh) for _ in range(4)]
    return {0: nn.Sequential(*layers[:2]), 1: nn.Sequential(*layers[2:])}


def test_all_layers_share_three_streams(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU has 32, and the communicators of the channels have most of them."""
    made: list[int] = []
    stream = torch.cpu.Stream

    def counted(priority: int = 0) -> torch.cpu.Stream:
        made.append(priority)
        return stream(priority)

    monkeypatch.setattr(torch.cpu, "Stream", counted)
    modules = stages(group)
    FullySharded(modules, (0,))
    FullySharded(modules, (0,))  # as after the user has frozen a layer
    assert [priority for priority in made if priority < 0] == [-1] * 3
    contexts = {layer._get_fsdp_state()._comm_ctx for stage in modules.values() for layer in stage}  # type: ignore[attr-defined]
    assert len(contexts) == 1


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("FSDPState", "_root_post_backward_final_callback"),
        ("FSDPCommContext", "lazy_init"),
        ("FSDPParamGroup", "post_backward"),
        ("FSDPParam", "to_accumulated_grad_if_needed"),
    ],
)
def test_a_torch_that_lacks_a_member_is_refused(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, owner: str, name: str
) -> None:
    modules = stages(group)
    state: Any = modules[0][0]._get_fsdp_state()  # type: ignore[index]
    owners = {type(each).__name__: type(each) for each in (state, state._comm_ctx, *state._fsdp_param_groups)}
    owners["FSDPParam"] = type(state._fsdp_param_groups[0].fsdp_params[0])
    monkeypatch.delattr(owners[owner], name)
    with pytest.raises(InvalidRun, match=rf"fully_shard of torch {torch.__version__[:4]}.* lacks {name}"):
        FullySharded(modules, (0,))


def test_layers_without_fully_shard_need_none_of_it() -> None:
    assert not FullySharded({0: nn.Linear(2, 2)}, (0,)).parameters


def test_a_thread_may_import_distributed_tensors_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the import ends, the module is known, but lacks its classes."""
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", ModuleType("torch.distributed.tensor"))
    assert not is_dtensor(torch.ones(1))
