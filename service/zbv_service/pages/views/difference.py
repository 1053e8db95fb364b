"""The differences between two problems, in a few lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zbv_solver.export import quantities
from zbv_solver.export.report.figures import cost_values
from zbv_solver.problem.cut import CutModel
from zbv_solver.problem.numeric import ROUNDING
from zbv_solver.problem.problem import Problem

_TERMS = {
    "forward": "forward F",
    "backward_input": "backward, input I",
    "backward_weight": "backward, weight W",
    "backward": "full backward B",
    "p2p": "transfer",
    "memory forward": "memory of F",
    "memory backward_input": "memory of I",
    "memory backward_weight": "memory of W",
}
"""Costs and deltas in words, by their names in :func:`cost_values`."""


@dataclass(frozen=True)
class Difference:
    """A quantity that differs, as texts."""

    name: str
    here: str
    there: str


def differences(here: Problem, there: Problem) -> tuple[Difference, ...]:
    """Every quantity that differs; values per stage, microbatch or rank are given as a range."""
    return tuple(
        Difference(name, mine, theirs) for name, mine, theirs in _quantities(here, there) if mine != theirs
    )


def _quantities(here: Problem, there: Problem) -> Iterator[tuple[str, str, str]]:
    yield "ranks", str(here.pp_degree), str(there.pp_degree)
    yield "microbatches", str(here.microbatches), str(there.microbatches)
    yield "placement", _placement(here), _placement(there)
    yield "objective", here.objective, there.objective
    yield "time unit", here.units.time or "none", there.units.time or "none"
    yield "memory unit", here.units.memory or "none", there.units.memory or "none"
    one, other = cost_values(here), cost_values(there)
    for name, mine, theirs in (
        *((term, one[name], other[name]) for name, term in _TERMS.items()),
        ("static memory", here.memory.static, there.memory.static),
        ("memory limit", here.memory.limit, there.memory.limit),
    ):
        if not _same(mine, theirs):
            yield name, *_told_apart(_spread(mine), _spread(theirs), mine, theirs)
    if (here.features, there.features) != ((), ()):
        yield "features", _features(here), _features(there)
    if here.model != there.model:
        yield "layers", *_layers_apart(here.model, there.model)


def _features(problem: Problem) -> str:
    return ", ".join(f"{each.name} {_spread(each.value)}" for each in problem.features) or "none"


def _layers_apart(mine: CutModel | None, theirs: CutModel | None) -> tuple[str, str]:
    one, other = _layers(mine), _layers(theirs)
    return (one, other) if one != other else (one, f"{other}, different layers or stages")


def _layers(model: CutModel | None) -> str:
    return "none" if model is None else f"{model.model.n_layers} in {model.cut.n_stages} stages"


def _placement(problem: Problem) -> str:
    return f"{problem.placement.kind}, {problem.placement.chunks} per rank"


def _same(mine: Sequence[float] | None, theirs: Sequence[float] | None) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    if len(mine) != len(theirs):
        # With other numbers of stages or ranks, values are equal if all of them are one and the same number.
        return len(set(mine) | set(theirs)) == 1 or not (mine or theirs)
    return all(map(_near, mine, theirs))


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= ROUNDING * max(abs(a), abs(b))


def _spread(values: Sequence[float] | None) -> str:
    return quantities.spread(values, lambda value: f"{value:.6g}")


def _told_apart(
    mine: str, theirs: str, here: Sequence[float] | None, there: Sequence[float] | None
) -> tuple[str, str]:
    """Add counts to ranges that are equal as texts although the values differ."""
    if mine != theirs or here is None or there is None:
        return mine, theirs
    if len(here) != len(there):
        return f"{mine}, {len(here)} values", f"{theirs}, {len(there)} values"
    count = sum(not _near(a, b) for a, b in zip(here, there, strict=True))
    return mine, f"{theirs}, {count} of {len(there)} differ"
