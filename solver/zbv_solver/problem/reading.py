"""From a parsed layered document to a layered problem, or to the problem of a cut that it gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zbv_solver.errors import InvalidInput, Issue
from zbv_solver.problem.cut import Cut, CutRules, Link, cut_of_partition
from zbv_solver.problem.layer import Layer, LayerCosts, LayerMemory, Model
from zbv_solver.problem.layered_document import (
    CutRulesDocument,
    LayerDocument,
    LayeredCostsDocument,
    LayeredMemoryDocument,
    LayeredProblemDocument,
    LayerMemoryDocument,
    RecomputeDocument,
    parse_layered,
)
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.numeric import exceeds
from zbv_solver.problem.problem import Problem, Units
from zbv_solver.problem.stage_document import UnitsDocument, parse_problem, require_possible_chunks


def parse_question(document: Any) -> Problem | LayeredProblem:
    """A decoded JSON document as a problem, or as a layered problem where its layers are still to be cut.

    Raises
    ------
    InvalidInput
        With one issue per broken rule, pointing into the document.
    """
    if isinstance(document, dict) and "layers" in document:
        parsed = parse_layered(document)
        return to_layered(parsed) if parsed.partition is None else to_cut_problem(parsed)
    return parse_problem(document)


def to_layered(document: LayeredProblemDocument) -> LayeredProblem:
    """A parsed document as a layered problem; raises :class:`InvalidInput`."""
    memory, costs = document.memory or LayeredMemoryDocument(), document.costs or LayeredCostsDocument()
    rules = document.cut or CutRulesDocument()
    units = document.units or UnitsDocument(time=None, memory=None)
    static = memory.static if memory.static_beside_layers is None else memory.static_beside_layers
    p = document.pp_degree
    require_possible_chunks(document.placement, document.chunks)
    if document.chunks is not None and document.placement == "auto":
        raise InvalidInput.at(
            "/chunks",
            f"found {document.chunks} with placement auto, which chooses them. Remove it, or use loop.",
        )
    if costs.link is not None and costs.p2p is not None and document.partition is None:
        raise InvalidInput.at("/costs", "found p2p and link; transfers follow from one of them. Remove one.")
    if document.partition is None:
        _refuse_stages(document)
    return LayeredProblem(
        model=Model(tuple(map(_layer, document.layers))),
        pp_degree=p,
        microbatches=document.microbatches,
        static=_per_rank(static, p),
        limit=None if memory.limit is None else _per_rank(memory.limit, p),
        placement=document.placement,
        chunks=document.chunks,
        objective=document.objective,
        p2p=0.0 if costs.p2p is None or isinstance(costs.p2p, list) else costs.p2p,
        link=None if costs.link is None else Link(costs.link.latency, costs.link.bandwidth),
        rules=CutRules(
            tuple(map(tuple, rules.together)),
            rules.first,
            rules.last,
            rules.allow_empty or any(not stage for stage in document.partition or ()),
        ),
        units=Units(units.time, units.memory),
    )


def to_cut_problem(document: LayeredProblemDocument) -> Problem:
    """The problem of a document that has a partition; what it states of stages must be what layers say.

    Raises
    ------
    InvalidInput
        Without a partition, or where the two differ.
    """
    if document.partition is None:
        raise InvalidInput.at(
            "/partition",
            "this key is absent: the layers are not cut into stages yet. Let `zbv plan` cut them, or "
            "POST /v1/searches.",
        )
    layered = to_layered(document)
    bounds = cut_of_partition(layered.model, document.partition)
    if document.placement == "auto":
        raise InvalidInput.at("/placement", "found 'auto' with a partition; say which placement it is of.")
    (placement,) = layered.placements
    if len(bounds) - 1 != placement.n_stages:
        rule = f"found {len(bounds) - 1} stages; placement {placement.kind} has {placement.n_stages}."
        raise InvalidInput.at("/partition", rule)
    recompute = document.recompute or [False] * placement.n_stages
    if len(recompute) != placement.n_stages:
        rule = f"found {len(recompute)} values; must be {placement.n_stages}, one per stage."
        raise InvalidInput.at("/recompute", rule)
    problem = layered.cut_into(placement, Cut.at(bounds, recompute))
    costs = document.costs
    if costs is not None and isinstance(costs.p2p, list) and costs.link is None:
        problem = replace(problem, costs=replace(problem.costs, p2p=tuple(costs.p2p)))
    _require_agreement(document, problem)
    return problem


def _refuse_stages(document: LayeredProblemDocument) -> None:
    """Raise where costs of stages are given and no partition says which stages."""
    issues = []
    costs, memory = document.costs, document.memory
    for at, given, names in (
        ("/costs", costs, ("forward", "backward_input", "backward_weight", "backward")),
        ("/memory", memory, ("forward", "backward_input", "backward_weight", "static_beside_layers")),
    ):
        issues += [
            Issue(f"{at}/{name}", "found beside layers; what stages cost follows from the layers. Remove it.")
            for name in names
            if getattr(given, name, None) is not None
        ]
    if costs is not None and isinstance(costs.p2p, list):
        issues.append(
            Issue("/costs/p2p", "found a list; where the stages are not known it is one number, or a link.")
        )
    if document.recompute is not None:
        issues.append(Issue("/recompute", "found without a partition; the planner decides. Remove it."))
    if issues:
        raise InvalidInput(issues)


def _require_agreement(document: LayeredProblemDocument, problem: Problem) -> None:
    issues = []
    for at, given, found in (
        ("/costs", document.costs, problem.costs),
        ("/memory", document.memory, problem.memory),
    ):
        for name in ("forward", "backward_input", "backward_weight", "backward", "p2p", "static"):
            stated, is_result = getattr(given, name, None), True
            if name == "static":
                is_result = document.memory is not None and document.memory.static_beside_layers is not None
            if not isinstance(stated, list) or not is_result:
                continue
            ours = getattr(found, name) or ()
            if len(stated) != len(ours) or any(map(_differ, stated, ours)):
                issues.append(
                    Issue(
                        f"{at}/{name}",
                        f"found {_brief(stated)}; the layers of the partition give {_brief(ours)}. Correct "
                        f"the layers, or remove this key.",
                    )
                )
    if issues:
        raise InvalidInput(issues)


def _differ(stated: float, ours: float) -> bool:
    return exceeds(stated, ours) or exceeds(ours, stated)


def _brief(values: Sequence[float]) -> str:
    shown = ", ".join(f"{value:.6g}" for value in values[:4])
    return f"[{shown}{', …' if len(values) > 4 else ''}]"


def _per_rank(values: float | list[float], p: int) -> tuple[float, ...]:
    return tuple(map(float, values)) if isinstance(values, list) else (float(values),) * p


def _layer(document: LayerDocument) -> Layer:
    costs = LayerCosts(
        document.forward,
        document.backward_input,
        document.backward_weight,
        document.backward,
        _memory(document.memory, document.parameters_bytes),
    )
    return Layer(
        document.name,
        costs,
        None if document.recompute is None else _alternative(document.recompute, costs),
        document.parameters_bytes,
        document.output_bytes,
        document.repeat,
    )


def _memory(document: LayerMemoryDocument | None, parameters_bytes: float) -> LayerMemory:
    if document is None:
        return LayerMemory(static=parameters_bytes)
    static = parameters_bytes if document.static is None else document.static
    return LayerMemory(
        document.forward, document.backward_input, document.backward_weight, static, document.workspace
    )


def _alternative(document: RecomputeDocument, own: LayerCosts) -> LayerCosts:
    def of(name: str) -> float:
        value: float | None = getattr(document, name)
        return float(getattr(own, name)) if value is None else value

    backward = document.backward
    if backward is None and own.backward is not None:
        grown = of("backward_input") + of("backward_weight") - own.split
        backward = max(0.0, own.backward + grown)
    memory = own.memory
    if document.memory is not None:
        memory = _memory(document.memory, own.memory.static)
    return LayerCosts(of("forward"), of("backward_input"), of("backward_weight"), backward, memory)
