"""Sharded replicas train like unsharded ones; what ``fully_shard`` must have for a pipeline."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_files import found_by
from support.sharded_rank import CASES
from support.thread_transport import ThreadHub
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from zbv_worker.errors import InvalidRun
from zbv_worker.gradients.fully_sharded import FullySharded, divide, dividing
from zbv_worker.stage.dtensors import is_dtensor

CPU = torch.device("cpu")
RANKS = range(4)
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """By rank, case and whether it was sharded."""
    folder = tmp_path_factory.mktemp("sharded")
    return found_by("sharded_rank", len(RANKS), folder)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("case", sorted(set(CASES) - {"clipped"}))
def test_sharded_replicas_get_exactly_the_parameters_of_unsharded_ones(
    found: Found, case: str, rank: int
) -> None:
    """Two replicas add two numbers, so even the rounding is equal.

    Tied parameters have two copies, whose gradients are added up in another order than those of one tensor.
    With parameters in half precision, ``fully_shard`` rounds the gradients of every microbatch before it adds
    them up in float32; the sums of whole gradients are not rounded. Losses are those of such parameters.
    """
    whole, sharded = found[rank][case][False], found[rank][case][True]
    rtol, atol = {"half": (2**-8, 3e-4), "tied": (1e-6, 1e-8), "tied over ranks": (1e-6, 1e-8)}.get(
        case, (0.0, 0.0)
    )
    for name in ("losses", "evaluations"):
        torch.testing.assert_close(sharded[name], whole[name], rtol=rtol, atol=atol)
    assert set(sharded["parameters"]) == set(whole["parameters"])
    for name, value in whole["parameters"].items():
        torch.testing.assert_close(sharded["parameters"][name], value, rtol=rtol, atol=atol)


@pytest.mark.parametrize("rank", RANKS)
def test_the_norm_for_clipping_includes_the_parts_of_all_replicas(found: Found, rank: int) -> None:
    whole, sharded = found[rank]["clipped"][False], found[rank]["clipped"][True]
    assert sharded["norms"] == pytest.approx(whole["norms"], rel=1e-6)
    for name, value in whole["parameters"].items():
        torch.testing.assert_close(sharded["parameters"][name], value, rtol=1e-6, atol=1e-7)


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


def test_all_layers_share_three_streams_of_high_priority(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_thread_may_import_distributed_tensors_in_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until the import ends, the module is known, but lacks its classes."""
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", ModuleType("torch.distributed.tensor"))
    assert not is_dtensor(torch.ones(1))
