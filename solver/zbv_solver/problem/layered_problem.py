"""Problems given by layers: the planner still has to cut the model into stages."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from zbv_solver.errors import InvalidInput, Issue
from zbv_solver.problem.cut import Cut, CutModel, CutRules, Link
from zbv_solver.problem.layer import Model
from zbv_solver.problem.limits import MAX_PP_DEGREE
from zbv_solver.problem.numeric import MAX_NUMBER, broken_rule
from zbv_solver.problem.placement import PLACEMENT_KINDS, Placement
from zbv_solver.problem.problem import OBJECTIVES, Costs, Memory, Objective, Problem, Units

PlacementChoice = Literal["auto", "v", "loop", "single"]

_COSTS = ("forward", "backward_input", "backward_weight", "fused")
_MEMORY = ("forward", "backward_input", "backward_weight", "static")
AUTO_CHUNKS = (2, 3, 4)
"""Chunks per rank of the loop placements that `auto` tries."""


@dataclass(frozen=True)
class LayeredProblem:
    """One pipeline-parallel training iteration of a model that zbv cuts into stages.

    Attributes
    ----------
    placement
        With ``auto``, the planner chooses the placement.
    chunks
        Stages per rank of placement loop; None means 2.
    p2p
        Latency of every stage boundary; ignored when ``link`` is given.
    static
        (p,) static memory of every rank in addition to that of its layers.
    limit
        (p,) or None.

    Raises
    ------
    InvalidInput
        With all broken rules; pointers are those of the JSON document.
    """

    model: Model
    pp_degree: int
    microbatches: int
    static: tuple[float, ...]
    limit: tuple[float, ...] | None = None
    placement: PlacementChoice = "v"
    chunks: int | None = None
    objective: Objective = "span"
    p2p: float = 0.0
    link: Link | None = None
    rules: CutRules = field(default_factory=CutRules)
    units: Units = field(default_factory=Units)

    def __post_init__(self) -> None:
        issues = _shape_issues(self) or [*_number_issues(self), *_rule_issues(self)] or _sum_issues(self)
        if issues:
            raise InvalidInput(issues)

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """The placements to plan, V first; `auto` stands for all those with enough layers."""
        p = self.pp_degree
        if self.placement != "auto":
            return (Placement.of(self.placement, p, self.chunks),)
        candidates = (
            Placement.of("v", p),
            *(Placement.of("loop", p, chunks) for chunks in AUTO_CHUNKS),
            Placement.of("single", p),
        )
        if p == 1:  # then all placements are the same
            candidates = (candidates[-1],)
        return tuple(placement for placement in candidates if self.has_room(placement.n_stages))

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """Layer indices where the model may be cut, from 0 to the number of layers."""
        model, may_cut = self.model, np.ones(self.model.n_layers + 1, np.bool_)
        for group in self.rules.together:
            inside = [model.place[name] for name in group]
            may_cut[min(inside) + 1 : max(inside) + 1] = False
        return np.flatnonzero(may_cut)

    @property
    def n_atoms(self) -> int:
        """Number of parts that are never cut: layers, or groups of layers that stay together."""
        return len(self.places) - 1

    def fixed_bounds(self, n_stages: int) -> dict[int, int] | None:
        """The prescribed boundaries: their layer index by number; None if they contradict each other."""
        n, rules = self.model.n_layers, self.rules
        fixed = {0: 0, n_stages: n}
        for bound, place in (
            (1, rules.first),
            (n_stages - 1, None if rules.last is None else n - rules.last),
        ):
            if place is not None and fixed.setdefault(bound, place) != place:
                return None
        return fixed

    def has_room(self, n_stages: int) -> bool:
        """Whether the rules allow any cut into that many stages."""
        fixed = self.fixed_bounds(n_stages)
        if fixed is None:
            return False
        least = 0 if self.rules.allow_empty else 1
        return all(
            np.searchsorted(self.places, end) - np.searchsorted(self.places, begin)
            >= least * (after - before)
            for (before, begin), (after, end) in pairwise(sorted(fixed.items()))
        )

    def cut_into(self, placement: Placement, cut: Cut) -> Problem:
        """The problem by stages that a cut results in."""
        model = CutModel(self.model, cut, self.rules, self.link, self.static)
        stages = [
            [layer.costs_when(recomputed) for layer in self.model.each[begin:end]]
            for (begin, end), recomputed in zip(pairwise(cut.bounds), cut.recompute, strict=True)
        ]

        def total(of: str) -> tuple[float, ...]:
            return tuple(float(sum(getattr(costs, of) for costs in stage)) for stage in stages)

        def held(of: str) -> tuple[float, ...]:
            return tuple(float(sum(getattr(costs.memory, of) for costs in stage)) for stage in stages)

        has_fused = any(costs.backward is not None for stage in stages for costs in stage)
        return Problem(
            placement=placement,
            microbatches=self.microbatches,
            costs=Costs(
                total("forward"),
                total("backward_input"),
                total("backward_weight"),
                tuple(self._transfer(bound) for bound in cut.bounds[1:-1]),
                total("fused") if has_fused else None,
            ),
            memory=Memory(
                held("forward"),
                held("backward_input"),
                held("backward_weight"),
                model.static_of(placement.stages_of),
                self.limit,
            ),
            objective=self.objective,
            units=self.units,
            model=model,
        )

    def as_cut_in(self, other: Problem) -> Problem:
        """This problem, cut, placed and recomputed like another one.

        Raises
        ------
        InvalidInput
            When the other problem has other layers, or a cut or a placement that this one does not allow.
        """
        model = other.model
        if model is None or model.model != self.model:
            raise InvalidInput.at("/problem/layers", "differ from the layers of the problem.")
        if other.placement not in self.placements:
            raise InvalidInput.at(
                "/problem/placement",
                f"found {other.placement.kind} with {other.placement.n_stages} stages on {other.pp_degree} "
                f"ranks; the problem asks for {self.placement} on {self.pp_degree}.",
            )
        fixed = self.fixed_bounds(other.n_stages) or {}
        if any(model.cut.bounds[bound] != place for bound, place in fixed.items()) or not set(
            model.cut.bounds
        ) <= set(map(int, self.places)):
            raise InvalidInput.at("/problem/partition", "breaks a rule of the problem's cut.")
        return self.cut_into(other.placement, model.cut)

    def _transfer(self, place: int) -> float:
        """Latency of the boundary at a layer index."""
        if self.link is None:
            return self.p2p
        return self.link.transfer(self.model.each[place - 1].output_bytes if place else 0.0)


AnyProblem = Problem | LayeredProblem


def _shape_issues(problem: LayeredProblem) -> list[Issue]:
    issues = []
    p, kinds = problem.pp_degree, ("auto", *PLACEMENT_KINDS)
    if problem.placement not in kinds:
        issues.append(Issue("/placement", f"found {problem.placement!r}; must be one of {', '.join(kinds)}."))
    if problem.objective not in OBJECTIVES:
        issues.append(
            Issue("/objective", f"found {problem.objective!r}; must be one of {', '.join(OBJECTIVES)}.")
        )
    if not 1 <= p <= MAX_PP_DEGREE:
        issues.append(Issue("/pp_degree", f"found {p}; must be an integer from 1 to {MAX_PP_DEGREE}."))
    if problem.microbatches < 1:
        issues.append(
            Issue("/microbatches", f"found {problem.microbatches}; must be an integer of at least 1.")
        )
    for index, group in enumerate(problem.rules.together):
        unknown = [name for name in group if name not in problem.model.place]
        if unknown or not group:
            found = f"{unknown[0]!r}, which is not a layer" if unknown else "no names"
            issues.append(Issue(f"/cut/together/{index}", f"found {found}; name layers of the model."))
    return issues


def _number_issues(problem: LayeredProblem) -> list[Issue]:
    issues, p = [], problem.pp_degree
    for pointer, values in (("/memory/static", problem.static), ("/memory/limit", problem.limit)):
        if values is not None and len(values) != p:
            issues.append(
                Issue(pointer, f"found {len(values)} values; must be a number or {p} values (one per rank).")
            )
    numbers = [
        ("/costs/p2p", problem.p2p),
        *(("/memory/static", value) for value in problem.static),
        *(("/memory/limit", value) for value in problem.limit or ()),
    ]
    if problem.link is not None:
        numbers.append(("/costs/link/latency", problem.link.latency))
        bandwidth = problem.link.bandwidth
        if not 0 < bandwidth < math.inf:
            issues.append(
                Issue("/costs/link/bandwidth", f"found {bandwidth:.15g}; must be positive and finite.")
            )
    broken = {pointer: broken_rule(value) for pointer, value in reversed(numbers) if broken_rule(value)}
    return issues + [Issue(pointer, rule) for pointer, rule in broken.items() if rule]


def _rule_issues(problem: LayeredProblem) -> list[Issue]:
    rules, n = problem.rules, problem.model.n_layers
    issues = []
    for name, count, place in (
        ("first", rules.first, rules.first),
        ("last", rules.last, None if rules.last is None else n - rules.last),
    ):
        if count is None or place is None:
            continue
        if not (0 if rules.allow_empty else 1) <= count <= n:
            issues.append(Issue(f"/cut/{name}", f"found {count}; must be from 1 to the model's {n} layers."))
        elif place not in problem.places:
            issues.append(
                Issue(f"/cut/{name}", f"found {count}; this separates layers that cut.together keeps.")
            )
    return issues or _too_few(problem)


def _sum_issues(problem: LayeredProblem) -> list[Issue]:
    """A stage may get any of the layers, so the sums over all of them must be valid costs of a stage."""
    each, link = problem.model.each, problem.link
    kinds = [[layer.costs_when(variant) for layer in each] for variant in (False, True)]
    longest = max(sum(getattr(costs, name) for costs in kind) for kind in kinds for name in _COSTS)
    largest = max(
        *(sum(abs(getattr(costs.memory, name)) for costs in kind) for kind in kinds for name in _MEMORY),
        *(max(costs.memory.workspace for costs in kind) for kind in kinds),
    )
    issues = []
    if broken_rule(3 * max(longest, largest + max(problem.static))):
        rule = f"found {max(longest, largest):.6g} as the sum over all layers; must be at most "
        rule += f"{MAX_NUMBER / 3:.6g}, for memory less memory.static. Use a larger unit."
        issues.append(Issue("/layers", rule))
    if link is not None and broken_rule(link.transfer(max(layer.output_bytes for layer in each))):
        rule = f"found a bandwidth of {link.bandwidth:.6g}: the longest transfer takes longer than "
        issues.append(Issue("/costs/link", rule + f"{MAX_NUMBER:g}. Use a larger unit of time."))
    return issues


def _too_few(problem: LayeredProblem) -> list[Issue]:
    """An issue if some stage would have to stay empty."""
    if problem.placements and all(problem.has_room(each.n_stages) for each in problem.placements):
        return []
    fewest = min((each.n_stages for each in problem.placements), default=problem.pp_degree)
    return [
        Issue(
            "/layers",
            f"found {problem.n_atoms} separable layers for {fewest} stages; every stage needs at least one, "
            f"in addition to those of cut.first and cut.last. Give finer layers, fewer ranks, another "
            f"placement, or cut.allow_empty.",
        )
    ]
