"""A rank that connects in several ways, one after the other, and writes down what it saw.

A program of :mod:`support.rank_files` for four ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from zbv_worker.transport.channels import ChannelKey
from zbv_worker.transport.connect import connect
from zbv_worker.transport.connected import ConnectedTransport
from zbv_worker.transport.world import Layout, World
from zbv_worker.values.structure import TensorSpec

CPU = torch.device("cpu")
TIMEOUT = 60.0
SPEC = TensorSpec((1,), torch.float32)


def used(layout: Layout | None = None) -> dict[str, Any]:
    """Connect, use everything once, and close; returns what this rank saw."""
    world = World.current()
    transport = connect(world, "gloo", CPU, TIMEOUT, layout)
    found = {
        "ranks": transport.gather(world.rank, TIMEOUT),
        "note": transport.posted("note"),
        "sum": transport.sum_over_ranks(torch.ones(1), TIMEOUT).item(),
        "from": received(transport),
        "copies": over_copies(transport),
        "messages": exchanged(transport),
    }
    transport.post("note", "an old one")
    transport.barrier(TIMEOUT)
    transport.close()
    return found


def received(transport: ConnectedTransport) -> float | None:
    """The global rank from which this one receives, when every position sends to the next one."""
    last = transport.layout.pp_degree - 1
    keys = [ChannelKey(position, position + 1) for position in range(last)]
    transport.open(keys, TIMEOUT)
    here = transport.pp_rank
    if here < last:
        transport.sender(keys[here])(torch.tensor([float(transport.rank)]), "its rank")
    number = None
    if here > 0:
        number = transport.receiver(keys[here - 1])(SPEC).wait(TIMEOUT).item()
    transport.flush(TIMEOUT)
    return number


def exchanged(transport: ConnectedTransport) -> list[float]:
    """Two host tensors of the rank before, of which the second is awaited first."""
    control, size = transport.control, transport.world_size
    sent = [torch.tensor([10.0 * number + transport.rank]) for number in (1, 2)]
    placed = [torch.zeros(1), torch.zeros(1)]
    sends = [control.start_send(tensor, (transport.rank + 1) % size) for tensor in sent]
    receives = [control.start_receive(tensor, (transport.rank - 1) % size) for tensor in placed]
    for wait in [*reversed(receives), *sends]:
        wait(TIMEOUT)
    return [tensor.item() for tensor in placed]


def over_copies(transport: ConnectedTransport) -> float:
    """The sum of the global ranks of this rank's replicas."""
    total = torch.tensor([float(transport.rank)])
    transport.sum_over_replicas(total).wait(TIMEOUT)
    return total.item()


def of_an_eager_group(run: Callable[[Layout], Any], layout: Layout) -> tuple[Any, list[str]]:
    """Run something in a default group as ``init_process_group(device_id=...)`` makes it for NCCL.

    Returns what it returns, and the splits of the default group's communicator that torch asked for.
    """
    splits: list[str] = []
    communicator = SimpleNamespace(perform_nocolor_split=lambda device: splits.append(str(device)))
    default, device = dist.group.WORLD, torch.device("cuda", 0)
    assert default is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default, "bound_device_id", device)
        patch.setattr(dist.distributed_c10d, "_get_split_source", lambda group: communicator)
        result = run(layout)
        assert default.bound_device_id == device
        splits.append("then")
        dist.new_group([0], backend="gloo")  # as users make it
    return result, splits


def found(folder: Path) -> dict[str, Any]:
    """What this rank saw."""
    found: dict[str, Any] = {"first": used(), "second": used(Layout(2, 2))}
    rank = World.current().rank
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "pp"))
    layout = Layout.of_mesh(mesh.mesh_dim_names, mesh.mesh, 4)
    found["guest"] = used(layout)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    found["guest again"] = used(Layout.of_mesh(mesh.mesh_dim_names, mesh.mesh, 4))
    found["eager"], found["splits"] = of_an_eager_group(used, layout)
    mine = torch.tensor([rank])
    dist.all_reduce(mine)
    found["user's sum"] = mine.item()
    dist.destroy_process_group()
    found["after"] = used()
    return found
