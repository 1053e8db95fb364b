"""Where a model is cut into stages, and which of them are recomputed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from zbv_solver.errors import InvalidInput
from zbv_solver.problem.layer import Model
from zbv_solver.problem.numeric import MIN_NUMBER


@dataclass(frozen=True)
class Link:
    """A link between ranks: a transfer takes ``latency + bytes / bandwidth``, in the problem's time unit."""

    latency: float
    bandwidth: float

    def transfer(self, output_bytes: float) -> float:
        """Duration of a transfer; 0 if it is shorter than any duration that zbv accepts."""
        duration = self.latency + output_bytes / self.bandwidth
        return duration if duration >= MIN_NUMBER else 0.0


@dataclass(frozen=True)
class CutRules:
    """Which cuts are allowed."""

    together: tuple[tuple[str, ...], ...] = ()
    """Groups of names; the layers from the first to the last of a group stay in one stage."""
    first: int | None = None
    last: int | None = None
    """Number of transformer layers of the first and the last stage, without the embedding before them and
    the head behind them; None lets the planner choose. For an executor whose ranks have several stages in
    a loop, it is that of the first and the last rank, divided evenly over their stages, as in Megatron-LM
    (``get_num_layers_to_build`` in ``megatron/core/transformer/transformer_block.py``)."""
    allow_empty: bool | None = None
    """Whether a stage may have no layers; it then forwards its input. None leaves it to the executor;
    plans of zbv have no empty stages then."""


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
