"""Parameters that replicas divide among them, gathered and summed as by ``fully_shard``, by stage."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch
from torch import Tensor
from zbv_worker.transport.channels import Transport
from zbv_worker.transport.torch_api import GroupOptions

from support.fake_nccl.cluster import FakeRank
from support.fake_nccl.device import FakeEvent
from support.fake_nccl.stages import DTYPE, WIDTH, FakeStage, parameters_of


class FakeShards:
    """Torch's ``fully_shard`` as :mod:`zbv_worker.gradients.fully_sharded` uses it.

    The streams and waits are those of torch 2.13: ``unshard``, ``wait_for_unshard`` and ``post_backward`` in
    ``_fsdp_param_group.py``, ``foreach_all_gather`` and ``foreach_reduce`` in ``_fsdp_collectives.py``,
    ``_root_pre_forward`` and ``_root_post_backward_final_callback`` in ``_fsdp_state.py``. The replicas have
    a group of the user. Memory that ``fully_shard`` resizes in place is not modelled.
    """

    def __init__(self, here: FakeRank, transport: Transport, stages: Mapping[int, FakeStage]):
        self._here = here
        self._transport = transport
        self._stages = stages
        width = WIDTH // transport.layout.replicas
        self.rows = slice(transport.replica * width, (transport.replica + 1) * width)
        self._parts = {
            stage: torch.tensor(parameters_of(stage).tolist()[self.rows], dtype=DTYPE, device="cuda")
            for stage in stages
        }
        self._whole: dict[int, Tensor] = {}
        for index, stage in stages.items():
            stage.parameters = lambda index=index: self._needed(index)
        options = GroupOptions(is_high_priority=False)
        groups = [
            here.nccl.new_group(ranks, timedelta(days=1), options, "fully_shard")
            for ranks in transport.layout.sets_of_copies()
        ]
        (self._group,) = (group for group in groups if group is not None)
        self._copies, self._gathers, self._reductions = (here.cuda.Stream(priority=-1) for _ in range(3))
        self._reducing: list[tuple[Tensor, FakeEvent]] = []
        self._found: dict[int, Tensor] = {}
        self._used: list[Tensor] = []

    def begin(self) -> None:
        """Order the gathers after the optimizer."""
        for stream in (self._copies, self._gathers):
            stream.wait_stream(self._here.cuda.current_stream())

    def _needed(self, stage: int) -> Tensor:
        """A stage's whole parameters. The first use gathers them."""
        if stage in self._whole:
            return self._whole[stage]
        cuda, compute = self._here.cuda, self._here.cuda.current_stream()
        with cuda.stream(self._copies):
            gathered = torch.empty(WIDTH, dtype=DTYPE, device="cuda")
            part = self._parts[stage].clone()
        self._gathers.wait_stream(self._copies)
        with cuda.stream(self._gathers):
            self._group.all_gather(gathered, part).wait()
            is_gathered = self._event()
        compute.wait_event(is_gathered)
        self._whole[stage] = gathered.clone()
        is_copied = self._event()
        for stream in (self._copies, self._gathers):
            stream.wait_event(is_copied)
        return self._whole[stage]

    def done(self, stage: int) -> None:
        """Start the sum of a stage's gradients, once the one before has ended, and free its parameters."""
        del self._whole[stage]
        cuda, compute = self._here.cuda, self._here.cuda.current_stream()
        for _, is_reduced in self._reducing:
            compute.wait_event(is_reduced)
        self._reducing.clear()
        total = self._stages[stage].weight.clone()
        self._reductions.wait_stream(compute)
        self._used.clear()  # memory of that stream, which the optimizer has read on the compute stream
        with cuda.stream(self._reductions):
            part = torch.empty(WIDTH // self._transport.layout.replicas, dtype=DTYPE, device="cuda")
            self._group.reduce_scatter(part, total).wait()
            self._reducing.append((total, self._event()))
        self._found[stage] = part

    def finish(self) -> dict[int, Tensor]:
        """Make the compute stream wait for the sums; returns this replica's parts of the gradients."""
        for _, is_reduced in self._reducing:
            self._here.cuda.current_stream().wait_event(is_reduced)
        self._reducing.clear()
        found, self._found = self._found, {}
        self._used += found.values()
        return {stage: part.clone() for stage, part in found.items()}

    def _event(self) -> FakeEvent:
        event = self._here.cuda.Event()
        event.record()
        return event
