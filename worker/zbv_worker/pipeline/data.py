"""Passes the batches of one rank of a pipeline, the data rank, on to the other ranks.

Before a step, each rank gets what its layers need, once per microbatch: the inputs with the first layer, the
targets with the last one, and the keywords that its layers take. The data rank does not wait until they have
arrived. Messages use the control plane, so they never wait for the channels between stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from zbv_solver.numerals import figure

from zbv_worker.errors import InvalidRun, ModelError, WorkerError
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.failures.failures import Failures
from zbv_worker.model.protocol import Microbatch
from zbv_worker.pipeline.calls import Given, Shapes
from zbv_worker.pipeline.connecting import PipelineOptions
from zbv_worker.pipeline.preparing import Prepared
from zbv_worker.stage.layers import Keywords
from zbv_worker.transport.connected import ConnectedTransport
from zbv_worker.transport.gloo_control import MAX_BYTES
from zbv_worker.values.packing import Packing
from zbv_worker.values.structure import Structure

_CPU = torch.device("cpu")
_AS_BEFORE = 0
"""In place of a header's length: the structure is that of the batch before."""


@dataclass(frozen=True)
class DataNeeds:
    """What the layers of one rank need of a microbatch."""

    input: bool
    target: bool
    keywords: Keywords

    def part_of(self, microbatch: Microbatch) -> Microbatch:
        """A microbatch without what is not needed."""
        given = microbatch.keywords
        unused = self.keywords.untaken(given) if self.keywords else given
        return Microbatch(
            microbatch.input if self.input else None,
            microbatch.target if self.target else None,
            {name: value for name, value in given.items() if name not in unused},
        )


def needs_of(plan: RankPlan, position: int, keywords: Keywords) -> DataNeeds:
    """What the rank at a position of a pipeline needs, if its layers take some keywords."""
    stages = plan.placement.stages_of[position]
    return DataNeeds(0 in stages, plan.placement.n_stages - 1 in stages, keywords)


class SharedData:
    """One rank's part in passing on the batches of its pipeline's data rank.

    Parameters
    ----------
    options
        Their ``data_rank`` is a position in the pipeline.
    failures
        Those of this rank's pipeline.

    Attributes
    ----------
    shapes
        A number that stands for the shapes of the newest batch, equal on all ranks of the pipeline.
    """

    def __init__(
        self,
        options: PipelineOptions,
        prepared: Prepared,
        transport: ConnectedTransport,
        failures: Failures,
    ):
        layout = transport.layout
        ranks = [layout.global_rank(at, transport.column) for at in range(layout.pp_degree)]
        self._source = ranks[options.data_rank or 0]
        self._rank = transport.rank
        self._control = transport.control
        self._needs = {
            rank: needs_of(prepared.plan, at, prepared.keywords_by_rank[rank])
            for at, rank in enumerate(ranks)
            if rank != self._source
        }
        self.shapes: Shapes = (0,) * prepared.plan.microbatches
        self._failures = failures
        self._timeout, self._patience = options.timeout, options.patience
        self._sent = dict[int, Structure]()
        self._received: Structure | None = None
        self._pending: list[Callable[[float], None]] = []

    def exchange(
        self, has_data: bool, split: Callable[[], list[Microbatch]], *, equal: bool
    ) -> list[Microbatch]:
        """This rank's microbatches of the next step or evaluation. Collective over the pipeline.

        Parameters
        ----------
        has_data
            Whether the caller gave this rank a batch.
        split
            Returns the microbatches of that batch.
        equal
            Whether these have equal shapes for certain.

        Raises
        ------
        InvalidRun
            On all ranks of the pipeline, if the data rank has no batch or one that cannot be used; the
            pipeline stays usable. If another rank has a batch, on that rank; this ends the pipeline.
        ChannelTimeout, PeerLost
            If a rank does not take part.
        """
        found = self._give(has_data, split, equal) if self._rank == self._source else self._take(has_data)
        self._patience = self._timeout
        return found

    @property
    def is_source(self) -> bool:
        """Whether this rank has the batches."""
        return self._rank == self._source

    def finish(self, timeout: float) -> None:
        """Wait until the other ranks have received everything."""
        pending, self._pending = self._pending, []
        for wait in pending:
            wait(timeout)

    def leave(self, timeout: float) -> None:
        """Like :meth:`finish`, as far as the ranks still receive."""
        with suppress(TimeoutError, ConnectionError):
            self.finish(timeout)

    def _give(self, has_data: bool, split: Callable[[], list[Microbatch]], equal: bool) -> list[Microbatch]:
        try:
            if not has_data:
                raise InvalidRun(
                    f"found no batch; rank {self._rank} is the pipeline's data rank and must pass one to "
                    f"step and evaluate."
                )
            microbatches = split()
            self.shapes = Given.of(microbatches, equal=equal).shapes
            parts = {rank: _part(microbatches, needs) for rank, needs in self._needs.items()}
        except WorkerError as error:
            with self._failures.watched("passing on that there is no batch"):
                text = str(error).encode()
                for rank in self._needs:
                    self._announce(-len(text), rank)
                    self._start(torch.frombuffer(bytearray(text), dtype=torch.uint8), rank)
            raise
        with self._failures.watched("sending the batch"):
            self.finish(self._patience)  # of the batch before
            for rank, (structure, tensors) in parts.items():
                self._send(structure, tensors, rank)
        return microbatches

    def _send(self, structure: Structure, tensors: list[Tensor], rank: int) -> None:
        if self._sent.get(rank) == structure:
            self._announce(_AS_BEFORE, rank)
        else:
            header = torch.frombuffer(bytearray(structure.json()), dtype=torch.uint8)
            self._announce(len(header), rank)
            self._start(header, rank)
            self._sent[rank] = structure
        if tensors:
            packed = Packing(structure.specs).pack(tensors, _CPU)
            # The caller may reuse a tensor that is sent without being packed.
            own = packed.detach().to(_CPU, copy=True) if packed is tensors[0] else packed
            self._start(_bytes(own.contiguous()), rank)

    def _announce(self, length: int, rank: int) -> None:
        self._start(torch.tensor([length, *self.shapes], device=_CPU), rank)

    def _start(self, tensor: Tensor, rank: int) -> None:
        self._pending.append(self._control.start_send(tensor, rank))

    def _take(self, has_data: bool) -> list[Microbatch]:
        with self._failures.watched(f"waiting for the batch of rank {self._source}"):
            if has_data:
                raise InvalidRun(
                    f"found a batch on rank {self._rank}; the pipeline's data rank is {self._source}, and "
                    f"other ranks must call step and evaluate without data. Omit the batch, or omit "
                    f"data_rank= to let every rank load its own."
                )
            announced = torch.empty(1 + len(self.shapes), dtype=torch.int64, device=_CPU)
            self._control.receive(announced, self._source, self._patience)
            length, *shapes = announced.tolist()
            self.shapes = tuple(shapes)
            if length < 0:
                refusal = self._receive(-length).numpy().tobytes().decode()
            else:
                return self._microbatches(length)
        raise InvalidRun(f"rank {self._source}: {refusal}")

    def _microbatches(self, length: int) -> list[Microbatch]:
        if length != _AS_BEFORE:
            self._received = Structure.parse(self._receive(length).numpy().tobytes())
        structure = self._received
        if structure is None:
            raise ModelError(f"rank {self._source} sent a batch without its structure.")
        tensors: list[Tensor] = []
        if structure.specs:
            packing = Packing(structure.specs)
            received = torch.empty(packing.spec.shape, dtype=packing.spec.dtype, device=_CPU)
            self._control.receive(_bytes(received), self._source, self._patience)
            tensors = packing.unpack(received)
        found: list[Microbatch] = structure.build(tensors)
        return found

    def _receive(self, length: int) -> Tensor:
        if length > MAX_BYTES:
            raise ModelError(f"rank {self._source} sent a message of {figure(length)} bytes.")
        received = torch.empty(length, dtype=torch.uint8, device=_CPU)
        self._control.receive(received, self._source, self._patience)
        return received


def _part(microbatches: Sequence[Microbatch], needs: DataNeeds) -> tuple[Structure, list[Tensor]]:
    """What a rank needs of all microbatches: its structure, and its tensors."""
    needed = [needs.part_of(each) for each in microbatches]
    try:
        structure = Structure.of(needed)
    except ModelError as error:
        raise InvalidRun(f"the batch cannot be sent to other ranks: {error}") from error
    return structure, structure.tensors(needed)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
