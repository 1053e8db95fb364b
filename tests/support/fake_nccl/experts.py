"""Stages of replicas that exchange tensors in their actions, as expert parallelism does."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch
from torch import Tensor
from zbv_worker.execution.turns import collective_started
from zbv_worker.transport.channels import Transport
from zbv_worker.transport.torch_api import GroupOptions

from support.fake_nccl.cluster import FakeRank
from support.fake_nccl.stages import FakeStage

_RESERVED = 1 << 16
"""Bytes for exchanges on their way."""


def exchange_between(here: FakeRank, transport: Transport, stages: Mapping[int, FakeStage]) -> None:
    """Give stages an exchange with the replicas: a gather, of which each keeps what it has sent.

    Numbers become wrong if the replicas do not exchange the same.
    """
    options = GroupOptions(is_high_priority=False)
    groups = [
        here.nccl.new_group(ranks, timedelta(days=1), options, "experts")
        for ranks in transport.layout.sets_of_copies()
    ]
    (group,) = (group for group in groups if group is not None)
    replicas, replica = transport.layout.replicas, transport.replica

    def exchange(tensor: Tensor, number: int) -> Tensor:
        size = tensor.numel() + 1
        own = torch.full((1,), float(number), dtype=tensor.dtype, device="cuda")
        whole = torch.empty(replicas * size, dtype=tensor.dtype, device="cuda")
        work = group.all_gather(whole, torch.cat([tensor.reshape(size - 1), own]))
        collective_started()
        work.wait()
        rows = whole.view(replicas, size)
        differs = (rows[:, size - 1] - own).square().sum()  # 0 if all replicas exchange the same
        return rows[replica, : size - 1].reshape(tensor.shape) + differs

    exchange(torch.zeros(1, device="cuda"), 0)  # connects the group before any step
    # In the first step, which waits for the host, fewer exchanges are on their way than later.
    here.device.memory.device.peak += _RESERVED
    for stage in stages.values():
        stage.exchange = exchange
