"""Where a plan cuts the model, and which stages it recomputes; what that asks of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from zbv_solver.problem.problem import Problem

from zbv_worker.errors import InvalidRun
from zbv_worker.model.protocol import Layered, PipelineModel, layer_names

Partition = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class PlannedCut:
    """What a plan says of the model, the same on every rank.

    Attributes
    ----------
    partition
        The layer names of every stage, in model order; None leaves the cut to the model.
    recompute
        Of every stage, whether its activations are computed again in the backward; None for no stage.
    """

    partition: Partition | None = None
    recompute: tuple[bool, ...] | None = None

    @classmethod
    def of(cls, problem: Problem) -> PlannedCut:
        """The cut of a plan's problem."""
        if problem.model is None:
            return cls()
        return cls(problem.model.partition, problem.model.cut.recompute)

    @classmethod
    def parse(cls, partition: Sequence[Sequence[str]] | None, recompute: Sequence[bool] | None) -> PlannedCut:
        """What a service or another rank says of a plan; what it leaves out is None."""
        return cls(
            None if partition is None else tuple(map(tuple, partition)),
            None if recompute is None else tuple(recompute),
        )

    def recomputes(self, stage: int) -> bool:
        """Whether a stage is recomputed."""
        return self.recompute is not None and self.recompute[stage]

    @property
    def recomputed(self) -> tuple[int, ...]:
        """The stages that are."""
        return tuple(stage for stage, is_so in enumerate(self.recompute or ()) if is_so)

    def require_stages(self, n_stages: int) -> None:
        """Raise :class:`InvalidRun` when it is not one of so many stages."""
        for what, found in (("partition", self.partition), ("recompute", self.recompute)):
            if found is not None and len(found) != n_stages:
                raise InvalidRun(
                    f"the plan's {what} is of {len(found)} stages; the plan has {n_stages}. Fetch the plan "
                    f"again from where it was made."
                )


def require_layers(model: PipelineModel, cut: PlannedCut) -> None:
    """Check that a model can be cut as a plan says; raises :class:`InvalidRun` when it cannot."""
    if cut.partition is None:
        return
    planned = [name for names in cut.partition for name in names]
    own = list(layer_names(require_layered(model, "the plan says which layers each stage has")))
    if planned != own:
        raise InvalidRun(
            f"the plan's partition is of another model: {_difference(planned, own)}. A partition has all "
            f"layers of the model in their order; plan with this model's layers (`zbv-worker estimate`), or "
            f"give the --model-args that the plan was made for."
        )


def require_layered(model: PipelineModel, why: str = "layers are to be measured") -> Layered:
    """A model that has layers; raises :class:`InvalidRun` for others."""
    if isinstance(model, Layered):
        return model
    raise InvalidRun(
        f"{why}, but --model gives a {type(model).__name__}, which has no layer_names and build_layers; see "
        f"zbv_worker.model.protocol.Layered. Add them, or plan without layers."
    )


def even_partition(names: Sequence[str], n_stages: int) -> Partition:
    """The layers dealt out evenly, whatever they cost."""
    bounds = [stage * len(names) // n_stages for stage in range(n_stages + 1)]
    return tuple(tuple(names[begin:end]) for begin, end in pairwise(bounds))


def _difference(planned: Sequence[str], own: Sequence[str]) -> str:
    """The first place where two lists of names differ."""
    at = next(
        (place for place, (a, b) in enumerate(zip(planned, own, strict=False)) if a != b),
        min(len(planned), len(own)),
    )
    said = [repr(names[at]) if at < len(names) else "nothing more" for names in (planned, own)]
    return f"as layer {at} it has {said[0]}, the model {said[1]}"
