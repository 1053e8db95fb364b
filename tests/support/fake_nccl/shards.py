"""Parameters that replicas divide among them, gathered and summed as by ``--shard`` or ``fully_shard``.

The orders are those of :mod:`zbv_worker.training.sharding` and of torch, by stage instead of by layer. Memory
that they resize in place is not modelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
from torch import Tensor
from zbv_worker.transport.channels import Reduction, Transport
from zbv_worker.transport.torch_api import GroupOptions

from support.fake_nccl.cluster import FakeRank
from support.fake_nccl.device import FakeEvent
from support.fake_nccl.stages import DTYPE, WIDTH, FakeStage, parameters_of

_TIMEOUT = 60.0


class FakeShards:
    """The parameters of one rank's stages.

    Parameters
    ----------
    order
        The stages in the order in which the plan first uses them.
    """

    def __init__(
        self, here: FakeRank, transport: Transport, stages: Mapping[int, FakeStage], order: Sequence[int]
    ):
        self._here = here
        self._transport = transport
        self._stages = stages
        self._order = order
        width = WIDTH // transport.layout.replicas
        self.rows = slice(transport.replica * width, (transport.replica + 1) * width)
        self._parts = {
            stage: torch.tensor(parameters_of(stage).tolist()[self.rows], dtype=DTYPE, device="cuda")
            for stage in stages
        }
        self._arriving: dict[int, tuple[Tensor, Reduction]] = {}
        self._whole: dict[int, Tensor] = {}
        self._ahead = 0
        self._sums: dict[int, tuple[Tensor, Reduction]] = {}
        for index, stage in stages.items():
            stage.parameters = lambda index=index: self._needed(index)

    def begin(self) -> None:
        """Start the first gather of a step."""
        self._ahead = 0
        self._prefetch()

    def _prefetch(self) -> None:
        if self._ahead < len(self._order):
            stage, self._ahead = self._order[self._ahead], self._ahead + 1
            whole = torch.empty(WIDTH, dtype=DTYPE, device="cuda")
            self._arriving[stage] = whole, self._transport.gather_over_replicas(self._parts[stage], whole)

    def _needed(self, stage: int) -> Tensor:
        """A stage's whole parameters. The first use waits for them and starts the next gather."""
        if stage in self._arriving:
            whole, reduction = self._arriving.pop(stage)
            reduction.wait(_TIMEOUT)
            self._whole[stage] = whole
            self._prefetch()
        return self._whole[stage]

    def done(self, stage: int) -> None:
        """Start the sum of a stage's gradients, and free its whole parameters."""
        part = torch.empty(WIDTH // self._transport.layout.replicas, dtype=DTYPE, device="cuda")
        summing = self._transport.sum_parts_over_replicas(self._stages[stage].weight, part)
        self._sums[stage] = part, summing
        del self._whole[stage]

    def finish(self) -> dict[int, Tensor]:
        """Wait for the sums; returns this replica's part of each stage's gradients."""
        found = {}
        for stage, (part, reduction) in self._sums.items():
            reduction.wait(_TIMEOUT)
            found[stage] = part
        self._sums.clear()
        return found


class FakeFullyShard(FakeShards):
    """Torch's ``fully_shard`` as :mod:`zbv_worker.training.fully_sharded` uses it.

    The streams and waits are those of torch 2.13: ``unshard``, ``wait_for_unshard`` and ``post_backward`` in
    ``_fsdp_param_group.py``, ``foreach_all_gather`` and ``foreach_reduce`` in ``_fsdp_collectives.py``,
    ``_root_pre_forward`` and ``_root_post_backward_final_callback`` in ``_fsdp_state.py``. The replicas have
    a group of the user.
    """

    def __init__(
        self, here: FakeRank, transport: Transport, stages: Mapping[int, FakeStage], order: Sequence[int]
    ):
        super().__init__(here, transport, stages, order)
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
