"""How a plan cuts the model into stages, which stages it recomputes, and whether the model allows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zbv_solver.problem.problem import Problem

from zbv_worker.errors import InvalidRun
from zbv_worker.model.checks import layer_names
from zbv_worker.model.protocol import Layered, PipelineModel

Partition = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class PlannedCut:
    """A plan's cut of the model, identical on every rank."""

    partition: Partition | None = None
    """The layer names of every stage, in model order; None if the model decides."""
    recompute: tuple[bool, ...] | None = None
    """For every stage, whether the backward recomputes its activations; None for no stage."""

    @classmethod
    def of(cls, problem: Problem) -> PlannedCut:
        """The cut of a plan's problem."""
        if problem.model is None:
            return cls()
        return cls(problem.model.partition, problem.model.cut.recompute)

    @classmethod
    def parse(cls, partition: Sequence[Sequence[str]] | None, recompute: Sequence[bool] | None) -> PlannedCut:
        """Read the cut from a service's or another rank's JSON."""
        return cls(
            None if partition is None else tuple(map(tuple, partition)),
            None if recompute is None else tuple(recompute),
        )

    def recomputes(self, stage: int) -> bool:
        """Whether the backward recomputes a stage's activations."""
        return self.recompute is not None and self.recompute[stage]

    @property
    def recomputed(self) -> tuple[int, ...]:
        """The recomputed stages."""
        return tuple(stage for stage, is_so in enumerate(self.recompute or ()) if is_so)

    def require_stages(self, n_stages: int) -> None:
        """Raise :class:`InvalidRun` if the cut does not have ``n_stages`` stages."""
        for what, found in (("partition", self.partition), ("recompute", self.recompute)):
            if found is not None and len(found) != n_stages:
                raise InvalidRun(
                    f"the plan's {what} has {len(found)} stages, but the plan has {n_stages}. Fetch the plan "
                    f"again from the service that made it."
                )


_REMEDY = (
    "Plan with this model's layers (`zbv-worker estimate`), or pass the --model-args of the plan's model"
)


def require_layers(model: PipelineModel | Layered, cut: PlannedCut, remedy: str = _REMEDY) -> None:
    """Check that the plan's layers are the model's; raises :class:`InvalidRun` if not.

    Parameters
    ----------
    remedy
        What to do, for the error.
    """
    if cut.partition is None:
        return
    planned = [name for names in cut.partition for name in names]
    own = list(layer_names(require_layered(model, "the plan assigns layers to stages")))
    if planned != own:
        raise InvalidRun(
            f"the plan's partition belongs to another model: {_difference(planned, own)}. A partition must "
            f"list all layers of the model in order. {remedy}."
        )


def require_layered(model: PipelineModel | Layered, why: str = "layers were requested") -> Layered:
    """Return a model that has layers; raises :class:`InvalidRun` for others."""
    if isinstance(model, Layered):
        return model
    raise InvalidRun(
        f"{why}, but --model gives a {type(model).__name__} without layer_names and build_layers; see "
        f"zbv_worker.model.Layered. Add these methods, or plan without layers."
    )


def _difference(planned: Sequence[str], own: Sequence[str]) -> str:
    """Describe the first difference between two lists of names."""
    at = next(
        (place for place, (a, b) in enumerate(zip(planned, own, strict=False)) if a != b),
        min(len(planned), len(own)),
    )
    found = [repr(names[at]) if at < len(names) else "nothing" for names in (planned, own)]
    return f"at layer {at} it has {found[0]}, the model {found[1]}"
