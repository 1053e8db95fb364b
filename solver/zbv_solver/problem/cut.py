"""Where a model is cut into stages, and which of them are recomputed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Annotated

from pydantic import Field

from zbv_solver.documents.fields import AtMost, Flag, Name, Number, Record
from zbv_solver.errors import InvalidInput
from zbv_solver.problem.layer import Model
from zbv_solver.problem.numeric import MAX_LAYERS, MIN_NUMBER


@dataclass(frozen=True)
class Link(Record):
    """A transfer takes `latency + bytes / bandwidth`, in the unit of time."""

    latency: Annotated[Number, Field(default=0.0)]
    bandwidth: Annotated[Number, Field(description="Bytes per unit of time.")]

    def transfer(self, output_bytes: float) -> float:
        """Duration of a transfer; 0 if it is shorter than any duration that zbv accepts."""
        duration = self.latency + output_bytes / self.bandwidth
        return duration if duration >= MIN_NUMBER else 0.0


_Group = Annotated[tuple[Name, ...], AtMost(MAX_LAYERS)]
_Blocks = Annotated[int, Field(strict=True, ge=0)] | None


@dataclass(frozen=True)
class CutRules(Record):
    """Which cuts are allowed."""

    together: Annotated[
        tuple[_Group, ...],
        AtMost(MAX_LAYERS),
        Field(description="Groups of names; the model is not cut between a group's first and last layer."),
    ] = ()
    first: Annotated[
        _Blocks,
        Field(description="Transformer layers of the first stage; for an executor, of the first rank."),
    ] = None
    last: Annotated[
        _Blocks, Field(description="Transformer layers of the last stage; for an executor, of the last rank.")
    ] = None
    """The embedding before them and the head behind them do not count; None lets the planner choose. An
    executor whose ranks have several stages in a loop divides those of a rank evenly over its stages, as
    Megatron-LM does (``get_num_layers_to_build`` in ``megatron/core/transformer/transformer_block.py``)."""
    allow_empty: Annotated[
        Flag | None,
        Field(description="Whether stages may have no layers; absent: only if the executor allows it."),
    ] = None
    """A stage without layers forwards its input. Plans of zbv have none unless this is true."""

    def fixed_bounds(self, model: Model, n_stages: int) -> dict[int, int] | None:
        """The prescribed boundaries: their layer index by number; None if they contradict each other."""
        fixed = {0: 0, n_stages: model.n_layers}
        blocks = model.blocks_before[-1]
        if n_stages == 1:
            return fixed if all(count in (None, blocks) for count in (self.first, self.last)) else None
        ends = ((1, self.first), (n_stages - 1, None if self.last is None else blocks - self.last))
        for bound, before in ends:
            place = None if before is None else model.place_behind(before)
            if place is not None and fixed.setdefault(bound, place) != place:
                return None
        return fixed

    def contradiction(self, model: Model, ends: int, what: str) -> str:
        """Why ``first`` and ``last`` cannot both hold on as many stages or ranks; empty if they can."""
        first, last, blocks = self.first, self.last, model.blocks_before[-1]
        if ends == 1 and any(count not in (None, blocks) for count in (first, last)):
            counts = (("first", first), ("last", last))
            named = " and ".join(f"cut.{name} {count}" for name, count in counts if count is not None)
            return (
                f"found {named}; a single one of the {what} has all {blocks} transformer layers. Leave it "
                f"out."
            )
        if ends == 1 or first is None or last is None:
            return ""
        left = blocks - first - last
        if left < 0:
            wrong = f"{-left} more than the model has"
        elif left > 0 and ends == 2:
            wrong = f"so {left} of the model's layers would be in none of the {what}"
        else:
            return ""
        total = f"{blocks}" if ends == 2 else f"at most {blocks}"
        return (
            f"found first {first} and last {last} on {ends} {what}: together {first + last} of {blocks} "
            f"transformer layers, {wrong}. Give numbers that add up to {total}, or leave one out."
        )


@dataclass(frozen=True)
class Cut:
    """A model in S contiguous stages."""

    bounds: tuple[int, ...]
    """(S+1,) boundaries as layer indices: stage s has the layers ``[bounds[s], bounds[s + 1])``."""
    recompute: tuple[bool, ...]
    """(S,): which stages are recomputed."""

    @property
    def n_stages(self) -> int:
        """Number of stages S."""
        return len(self.recompute)

    @classmethod
    def at(cls, bounds: Iterable[int], recompute: Iterable[bool] | None = None) -> Cut:
        """A cut; without ``recompute``, no stage is recomputed."""
        places = tuple(map(int, bounds))
        if recompute is None:
            recompute = (False,) * (len(places) - 1)
        return cls(places, tuple(map(bool, recompute)))


@dataclass(frozen=True)
class CutModel:
    """The layers and the cut that the stages of a problem come from."""

    model: Model
    cut: Cut
    rules: CutRules
    link: Link | None
    """The link that p2p costs were computed from; None if p2p was given."""
    static: tuple[float, ...]
    """(p,) static memory of every rank in addition to that of its layers."""
    devices: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()
    blocking: bool = False
    """As in :class:`~zbv_solver.problem.layered_problem.LayeredProblem`."""
    blocked: float = 0.0
    """The latency that blocking transfers without a link add to the costs of stages."""
    host: Link | None = None
    """The link that the times of copies were computed from; None without copies."""

    @cached_property
    def partition(self) -> tuple[tuple[str, ...], ...]:
        """The layer names of every stage."""
        return tuple(self.model.names[begin:end] for begin, end in pairwise(self.cut.bounds))

    def static_of(self, hosted: Sequence[Sequence[int]]) -> tuple[float, ...]:
        """(p,) static memory of ranks with these stages, including layers and the largest workspace."""
        totals = []
        devices = self.devices or (None,) * len(self.static)
        for own, device, stages in zip(self.static, devices, hosted, strict=True):
            held: list[float] = []
            largest = 0.0
            for stage in stages:
                layers = slice(self.cut.bounds[stage], self.cut.bounds[stage + 1])
                columns = self.model.columns(self.cut.recompute[stage], device)
                held += columns.static[layers]
                largest = max(largest, *columns.workspace[layers], 0.0)
            totals.append(own + sum(held) + largest)
        return tuple(totals)

    def merged(self, chunks: int) -> CutModel | None:
        """Merge every ``chunks`` neighbouring stages; None if only some of them are recomputed."""
        groups = [self.cut.recompute[k : k + chunks] for k in range(0, self.cut.n_stages, chunks)]
        if any(len(set(group)) > 1 for group in groups):
            return None
        return replace(self, cut=Cut.at(self.cut.bounds[::chunks], [group[0] for group in groups]))


def cut_of_partition(model: Model, partition: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """The boundaries of a partition given by layer names.

    Raises :class:`InvalidInput` when the partition does not list the model's layers in their order.
    """
    bounds = [0]
    for stage, names in enumerate(partition):
        for index, name in enumerate(names):
            place = bounds[stage] + index
            if place >= model.n_layers or model.names[place] != name:
                expected = repr(model.names[place]) if place < model.n_layers else "no more layers"
                raise InvalidInput.at(
                    f"/partition/{stage}/{index}",
                    f"found {name!r}, expected {expected}. A partition lists all layers in model order.",
                )
        bounds.append(bounds[stage] + len(names))
    if bounds[-1] != model.n_layers:
        missing = model.names[bounds[-1]]
        raise InvalidInput.at("/partition", f"{missing!r} and later layers are in no stage.")
    return tuple(bounds)
