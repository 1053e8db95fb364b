"""What ``fully_shard`` must have for a pipeline, and the streams that it takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from zbv_worker.errors import InvalidRun
from zbv_worker.gradients.fully_sharded import FullySharded


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """One rank."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # missing in torch's stubs
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def stages(mesh: DeviceMesh) -> dict[int, nn.Module]:
    """Two stages of two layers with ``fully_shard``."""
    layers: list[Any] = [fully_shard(nn.Linear(3, 3), mesh=mesh) for _ in range(4)]
    return {0: nn.Sequential(*layers[:2]), 1: nn.Sequential(*layers[2:])}


def test_all_layers_share_three_streams_of_high_priority(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU has 32, and the communicators of the channels have most of them."""
    made: list[int] = []
    stream = torch.cpu.Stream

    def counted(priority: int = 0) -> torch.cpu.Stream:
        made.append(priority)
        return stream(priority)

    monkeypatch.setattr(torch.cpu, "Stream", counted)
    modules = stages(mesh)
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
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, owner: str, name: str
) -> None:
    modules = stages(mesh)
    state: Any = modules[0][0]._get_fsdp_state()  # type: ignore[index]
    owners = {type(each).__name__: type(each) for each in (state, state._comm_ctx, *state._fsdp_param_groups)}
    owners["FSDPParam"] = type(state._fsdp_param_groups[0].fsdp_params[0])
    monkeypatch.delattr(owners[owner], name)
    with pytest.raises(InvalidRun, match=rf"fully_shard of torch {torch.__version__[:4]}.* lacks {name}"):
        FullySharded(modules, (0,))


def test_layers_without_fully_shard_need_none_of_it() -> None:
    assert not FullySharded({0: nn.Linear(2, 2)}, (0,)).parameters
