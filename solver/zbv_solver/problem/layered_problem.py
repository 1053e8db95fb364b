"""Problems given by layers: the planner still has to cut the model into stages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, starmap
from operator import add
from statistics import fmean
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from zbv_solver.errors import InvalidInput, Issue
from zbv_solver.problem.cut import Cut, CutModel, CutRules, Link
from zbv_solver.problem.layer import Layer, LayerCosts, LayerMemory, Model
from zbv_solver.problem.numeric import MAX_DEVICES, MAX_NUMBER, broken_rule, first_broken
from zbv_solver.problem.problem import Objective, Problem, Units, basic_rules
from zbv_solver.problem.rules import MAX_PAIR_FACTOR
from zbv_solver.problem.stages import PLACEMENT_KINDS, Communication, Copies, Costs, Memory, Placement

PlacementChoice = Literal["auto", "v", "loop", "single"]

_COSTS = ("forward", "backward_input", "backward_weight", "fused")
_MEMORY = ("forward", "backward_input", "backward_weight", "static")
AUTO_CHUNKS = (2, 3, 4)
"""Chunks per rank of the loop placements that `auto` tries."""


@dataclass(frozen=True)
class LayeredProblem:
    """One pipeline-parallel training iteration of a model that zbv cuts into stages.

    Raises
    ------
    InvalidInput
        With all broken rules; pointers are those of the JSON document.
    """

    model: Model
    pp_degree: int
    microbatches: int
    static: tuple[float, ...]
    """(p,) static memory of every rank in addition to that of its layers."""
    limit: tuple[float, ...] | None = None
    """(p,) or None."""
    placement: PlacementChoice = "v"
    """With ``auto``, the planner chooses the placement."""
    chunks: int | None = None
    """Stages per rank of placement loop; None means 2."""
    objective: Objective = "span"
    p2p: float = 0.0
    """Latency of every stage boundary; ignored when ``link`` is given."""
    link: Link | None = None
    rules: CutRules = field(default_factory=CutRules)
    units: Units = field(default_factory=Units)
    measured: tuple[tuple[str, str], ...] = ()
    """As in :class:`Problem`."""
    devices: tuple[str, ...] = ()
    """(p,) kind of device of every rank, whose costs layers may state; empty if all ranks are alike."""
    links: tuple[Link, ...] = ()
    """(p,) or empty: in place of ``link``, the link from every rank to the next one, and from the last
    rank to the first."""
    blocking: bool = False
    """Whether transfers keep both ranks waiting instead of overlapping with their actions. The costs of a
    cut's stages then include them: those of an F that of its output, and those of a backward that of the
    gradient it returns."""
    pair_factor: float = 1.0
    """What the two actions of a pair cost each other, at least 1; there are pairs if a layer states
    communication."""
    host: Link | None = None
    """Between a device and its host, in either direction: all that an F keeps may be copied. None: nothing
    may."""
    host_limit: tuple[float, ...] | None = None
    """(p,) memory of the host for the copies of every rank; None if unlimited."""

    def __post_init__(self) -> None:
        issues = (
            [*_shape_issues(self), *_device_issues(self)]
            or [*_number_issues(self), *_rule_issues(self)]
            or [*_sum_issues(self)]
        )
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

    @property
    def has_pairs(self) -> bool:
        """Whether an F and a backward may run as a pair."""
        return self.model.has_communication

    def with_communication_hidden(self) -> LayeredProblem:
        """A problem without pairs whose best plan is no longer than the best one with pairs: Lemma 65."""
        if not self.has_pairs:
            return self

        def hidden(layer: Layer) -> Layer:
            return layer.with_costs(lambda costs: costs.with_communication_hidden(self.pair_factor))

        model = replace(self.model, layers=tuple(map(hidden, self.model.layers)))
        return replace(self, model=model, pair_factor=1.0)

    def without_what_copies_move(self) -> LayeredProblem:
        """A problem without copies whose best plan is no longer than the best one with copies.

        Layers keep nothing after their F, and each has room for what it needs and keeps: Lemma 63.
        """
        if self.host is None:
            return self

        def moved(costs: LayerCosts) -> LayerCosts:
            held = costs.memory
            return replace(
                costs, memory=LayerMemory(static=held.static, workspace=held.workspace + held.forward)
            )

        layers = tuple(layer.with_costs(moved) for layer in self.model.layers)
        return replace(self, model=replace(self.model, layers=layers), host=None, host_limit=None)

    @cached_property
    def relaxed(self) -> LayeredProblem:
        """A problem without pairs and copies, whose bounds over all cuts also hold for its plans."""
        return self.with_communication_hidden().without_what_copies_move()

    @cached_property
    def kinds(self) -> tuple[str | None, ...]:
        """The different devices of the ranks; a single None if all ranks are alike."""
        return tuple(dict.fromkeys(self.devices)) or (None,)

    @cached_property
    def kind_of(self) -> tuple[int, ...]:
        """(p,) index of every rank's device in ``kinds``."""
        return tuple(map(self.kinds.index, self.devices)) or (0,) * self.pp_degree

    @property
    def has_equal_ranks(self) -> bool:
        """Whether layers and transfers cost the same on all ranks."""
        return not self.devices and not self.links

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

    def has_room(self, n_stages: int) -> bool:
        """Whether the rules allow any cut into that many stages."""
        fixed = self.rules.fixed_bounds(self.model, n_stages)
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
        # A cut is made, so its rules no longer depend on an executor.
        rules = replace(self.rules, allow_empty=bool(self.rules.allow_empty))
        model = CutModel(
            self.model,
            cut,
            rules,
            self.link,
            self.static,
            self.devices,
            self.links,
            self.blocking,
            self.p2p if self.blocking else 0.0,
            self.host,
        )
        rank_of = placement.rank_of
        columns = [
            self.model.columns(recomputed, self.kinds[self.kind_of[rank]])
            for recomputed, rank in zip(cut.recompute, rank_of, strict=True)
        ]
        stages = [*zip(columns, starmap(slice, pairwise(cut.bounds)), strict=True)]

        def total(of: str) -> tuple[float, ...]:
            return tuple(float(sum(getattr(columns, of)[layers])) for columns, layers in stages)

        held = total("after_forward")
        copied = None if self.host is None else tuple(map(self.host.transfer, held))
        has_fused = any(any(columns.is_fused[layers]) for columns, layers in stages)
        costs = Costs(
            total("forward"),
            total("backward_input"),
            total("backward_weight"),
            tuple(map(self.transfer, cut.bounds[1:-1], rank_of, rank_of[1:])),
            total("fused") if has_fused else None,
        )
        return Problem(
            placement=placement,
            microbatches=self.microbatches,
            costs=_waiting(costs, placement) if self.blocking else costs,
            memory=Memory(
                held,
                total("after_input"),
                total("after_weight"),
                model.static_of(placement.stages_of),
                self.limit,
            ),
            objective=self.objective,
            units=self.units,
            model=model,
            measured=self.measured,
            communication=Communication(total("hidden_forward"), total("hidden_input"), total("hidden_fused"))
            if self.has_pairs
            else None,
            pair_factor=self.pair_factor if self.has_pairs else 1.0,
            copies=None if copied is None else Copies(copied, copied, held, self.host_limit),
        )

    def as_cut_in(self, other: Problem) -> Problem:
        """This problem, cut, placed and recomputed like another one.

        Raises :class:`InvalidInput` when the other problem has other layers, or a cut or a placement that
        this one does not allow.
        """
        model = other.model
        if model is None or model.model != self.model:
            raise InvalidInput.at("/problem/layers", "differ from the layers of the problem.")
        if model.devices != self.devices:
            raise InvalidInput.at("/problem/devices", "differ from the devices of the problem.")
        if other.placement not in self.placements:
            raise InvalidInput.at(
                "/problem/placement",
                f"found {other.placement.kind} with {other.placement.n_stages} stages on {other.pp_degree} "
                f"ranks; the problem asks for {self.placement} on {self.pp_degree}.",
            )
        fixed = self.rules.fixed_bounds(self.model, other.n_stages) or {}
        if any(model.cut.bounds[bound] != place for bound, place in fixed.items()) or not set(
            model.cut.bounds
        ) <= set(map(int, self.places)):
            raise InvalidInput.at("/problem/partition", "breaks a rule of the problem's cut.")
        return self.cut_into(other.placement, model.cut)

    def transfer(self, place: int, near: int = 0, far: int = 0) -> float:
        """Latency of the boundary at a layer index, between two ranks that are neighbours."""
        link = self.link
        if self.links:
            # Ranks that are not next to each other are the last and the first one.
            link = self.links[min(near, far) if abs(near - far) <= 1 else -1]
        if link is None:
            return self.p2p
        return link.transfer(self.model.each[place - 1].output_bytes if place else 0.0)


AnyProblem = Problem | LayeredProblem


def uncut(problem: Problem, placement: PlacementChoice | Placement | None = None) -> LayeredProblem:
    """The layers of a problem before they were cut, on its own placement or another one.

    Without a link, the transfer time is the same at every boundary: the mean of the problem's times.

    Raises
    ------
    ValueError
        When the problem has no layers.
    InvalidInput
        When the layers are too few for the placement.
    """
    cut = problem.model
    if cut is None:
        raise ValueError("found a problem without layers, which has no cut.")
    asked = placement or problem.placement
    chunks = asked.chunks if isinstance(asked, Placement) else problem.placement.chunks
    kind = asked.kind if isinstance(asked, Placement) else asked
    has_p2p = problem.costs.p2p and cut.link is None and not cut.links
    return LayeredProblem(
        model=cut.model,
        pp_degree=problem.pp_degree,
        microbatches=problem.microbatches,
        static=cut.static,
        limit=problem.memory.limit,
        placement=kind,
        chunks=chunks if kind == "loop" else None,
        objective=problem.objective,
        p2p=cut.blocked if cut.blocking else fmean(problem.costs.p2p) if has_p2p else 0.0,
        link=cut.link,
        links=cut.links,
        devices=cut.devices,
        # Of a cut it is not known whether empty stages were forbidden, or only not asked for.
        rules=replace(cut.rules, allow_empty=cut.rules.allow_empty or None),
        units=problem.units,
        measured=problem.measured,
        blocking=cut.blocking,
        pair_factor=problem.pair_factor,
        host=cut.host,
        host_limit=None if problem.copies is None else problem.copies.host_limit,
    )


def _waiting(costs: Costs, placement: Placement) -> Costs:
    """The costs of stages with the transfers to other ranks, which then take no further time."""
    p2p = [0.0 if placement.is_local(at) else time for at, time in enumerate(costs.p2p)]
    after, before = (*p2p, 0.0), (0.0, *p2p)
    fused = costs.backward
    return replace(
        costs,
        forward=tuple(map(add, costs.forward, after)),
        backward_input=tuple(map(add, costs.backward_input, before)),
        backward=None if fused is None else tuple(map(add, fused, before)),
        p2p=(0.0,) * len(p2p),
    )


def _shape_issues(problem: LayeredProblem) -> Iterator[Issue]:
    yield from basic_rules(
        problem.pp_degree,
        problem.microbatches,
        problem.objective,
        problem.placement,
        ("auto", *PLACEMENT_KINDS),
    )
    for index, group in enumerate(problem.rules.together):
        unknown = [name for name in group if name not in problem.model.place]
        if unknown or not group:
            found = f"{unknown[0]!r}, which is not a layer" if unknown else "no names"
            yield Issue(f"/cut/together/{index}", f"found {found}; name layers of the model.")


def _number_issues(problem: LayeredProblem) -> Iterator[Issue]:
    p, link = problem.pp_degree, problem.link
    for pointer, values in (
        ("/memory/static", problem.static),
        ("/memory/limit", problem.limit),
        ("/memory/host_limit", problem.host_limit),
    ):
        if values is not None and len(values) != p:
            rule = f"found {len(values)} values; must be a number or {p} values (one per rank)."
            yield Issue(pointer, rule)
    if problem.links and (len(problem.links) != p or link is not None):
        rule = f"found {len(problem.links)} links; must be one for all, or {p}: from every rank to the next."
        yield Issue("/costs/link", rule)
    for at, each in _links(problem):
        if not 0 < each.bandwidth < math.inf:
            yield Issue(f"{at}/bandwidth", f"found {each.bandwidth:.15g}; must be positive and finite.")
    if not 1 <= problem.pair_factor <= MAX_PAIR_FACTOR:
        rule = f"found {problem.pair_factor:.15g}; must be a number from 1 to {MAX_PAIR_FACTOR:g}."
        yield Issue("/costs/pair_factor", rule)
    for pointer, values in (
        ("/costs/p2p", (problem.p2p,)),
        ("/memory/static", problem.static),
        ("/memory/limit", problem.limit or ()),
        ("/memory/host_limit", problem.host_limit or ()),
        *((f"{at}/latency", (each.latency,)) for at, each in _links(problem)),
    ):
        if (broken := first_broken(values)) is not None:
            yield Issue(pointer, broken[1])


def _links(problem: LayeredProblem) -> list[tuple[str, Link]]:
    """The links with their pointers."""
    named = (("/costs/link", problem.link), ("/costs/host_link", problem.host))
    own = [(at, link) for at, link in named if link is not None]
    return own + [(f"/costs/link/{rank}", each) for rank, each in enumerate(problem.links)]


def _device_issues(problem: LayeredProblem) -> Iterator[Issue]:
    p, devices = problem.pp_degree, problem.devices
    if devices and len(devices) != p:
        yield Issue("/devices", f"found {len(devices)} names; must be {p}, one per rank.")
    if len(problem.kinds) > MAX_DEVICES:
        yield Issue("/devices", f"found {len(problem.kinds)} different names; must be at most {MAX_DEVICES}.")
    for index, layer in enumerate(problem.model.layers):
        unknown = {each.device for each in layer.on} - set(devices)
        if unknown:
            detail = f"found {min(unknown)!r}, which no rank has. Name a device of /devices."
            yield Issue(f"/layers/{index}/on", detail)


def _rule_issues(problem: LayeredProblem) -> list[Issue]:
    rules, model = problem.rules, problem.model
    blocks, issues = model.blocks_before[-1], []
    for name, count in (("first", rules.first), ("last", rules.last)):
        if count is None:
            continue
        if count > blocks:
            rule = f"must be at most the model's {blocks} transformer layers."
        elif model.place_behind(count if name == "first" else blocks - count) not in problem.places:
            rule = "this separates layers that cut.together keeps."
        else:
            continue
        issues.append(Issue(f"/cut/{name}", f"found {count}; {rule}"))
    return issues or [*_room_issues(problem)]


def _room_issues(problem: LayeredProblem) -> Iterator[Issue]:
    placements, rules = problem.placements, problem.rules
    if placements and all(problem.has_room(each.n_stages) for each in placements):
        return
    fewest = min((each.n_stages for each in placements), default=problem.pp_degree)
    if lost := rules.contradiction(problem.model, fewest, "stages"):
        yield Issue("/cut", lost)
        return
    has_ends = rules.first is not None or rules.last is not None
    ends = ", in addition to those of cut.first and cut.last" if has_ends else ""
    yield Issue(
        "/layers",
        f"found {problem.n_atoms} separable layers for {fewest} stages; every stage needs at least "
        f"one{ends}. Give finer layers, fewer ranks or another placement, or set cut.allow_empty, except for "
        f"PyTorch and torchtitan, which cannot run empty stages.",
    )


def _sum_issues(problem: LayeredProblem) -> Iterator[Issue]:
    """A stage may get any of the layers, so the sums over all of them must be valid costs of a stage."""
    each = problem.model.each
    kinds = [
        [layer.costs_when(recomputed, device) for layer in each]
        for device in problem.kinds
        for recomputed in (False, True)
    ]
    longest = max(sum(getattr(costs, name) for costs in kind) for kind in kinds for name in _COSTS)
    largest = max(
        *(sum(abs(getattr(costs.memory, name)) for costs in kind) for kind in kinds for name in _MEMORY),
        *(max(costs.memory.workspace for costs in kind) for kind in kinds),
    )
    if broken_rule(3 * max(longest, largest + max(problem.static))):
        yield Issue(
            "/layers",
            f"found {max(longest, largest):.6g} as the sum over all layers; must be at most "
            f"{MAX_NUMBER / 3:.6g}, for memory less memory.static. Use a larger unit.",
        )
    most = max(layer.output_bytes for layer in each)
    for at, link in _links(problem):
        if broken_rule(link.transfer(largest if link is problem.host else most)):
            yield Issue(
                at,
                f"found a bandwidth of {link.bandwidth:.6g}: the longest transfer takes longer than "
                f"{MAX_NUMBER:g}. Use a larger unit of time.",
            )
