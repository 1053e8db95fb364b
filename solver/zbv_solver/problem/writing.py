"""Problems as JSON documents, normalised: every key present, every value in full."""

from __future__ import annotations

from typing import Any

from zbv_solver.documents.text import number, numbers
from zbv_solver.problem.cut import CutModel, CutRules, Link
from zbv_solver.problem.layer import Layer, LayerCosts
from zbv_solver.problem.layered_problem import AnyProblem, LayeredProblem
from zbv_solver.problem.problem import Problem, Units


def any_problem_json(problem: AnyProblem) -> dict[str, Any]:
    """A problem, by stages or by layers, as a document."""
    return layered_json(problem) if isinstance(problem, LayeredProblem) else problem_json(problem)


def problem_json(problem: Problem) -> dict[str, Any]:
    """A problem, normalised: every key present, every value one per stage, boundary or rank."""
    costs, memory, units = problem.costs, problem.memory, problem.units
    document: dict[str, Any] = {
        "pp_degree": problem.pp_degree,
        "microbatches": problem.microbatches,
        "placement": problem.placement.kind,
        "objective": problem.objective,
        "costs": {
            "forward": numbers(costs.forward),
            "backward_input": numbers(costs.backward_input),
            "backward_weight": numbers(costs.backward_weight),
            "backward": None if costs.backward is None else numbers(costs.backward),
            "p2p": numbers(costs.p2p),
        },
        "memory": {
            "forward": numbers(memory.forward),
            "backward_input": numbers(memory.backward_input),
            "backward_weight": numbers(memory.backward_weight),
            "static": numbers(memory.static),
            "limit": None if memory.limit is None else numbers(memory.limit),
        },
    }
    if problem.placement.kind == "loop":
        document["chunks"] = problem.placement.chunks
    if problem.model is not None:
        document |= cut_model_json(problem.model)
        document["memory"]["static_beside_layers"] = numbers(problem.model.static)
        if problem.model.link is not None:
            document["costs"]["link"] = link_json(problem.model.link)
    return {**document, **units_json(units)}


def units_json(units: Units) -> dict[str, Any]:
    """The key ``units`` with the units that have names; empty if none has."""
    named = {"time": units.time, "memory": units.memory}
    given = {key: value for key, value in named.items() if value is not None}
    return {"units": given} if any(given.values()) else {}


def cut_model_json(model: CutModel) -> dict[str, Any]:
    """The keys that a plan's problem has in addition if its stages come from layers."""
    document: dict[str, Any] = {
        "layers": [_layer_json(layer) for layer in model.model.layers],
        "partition": [list(names) for names in model.partition],
        "cut": _rules_json(model.rules),
    }
    if model.model.can_recompute:
        document["recompute"] = list(model.cut.recompute)
    return document


def _rules_json(rules: CutRules) -> dict[str, Any]:
    return {
        "together": [list(group) for group in rules.together],
        "first": rules.first,
        "last": rules.last,
        "allow_empty": rules.allow_empty,
    }


def _layer_json(layer: Layer) -> dict[str, Any]:
    document = {
        "name": layer.name,
        **_costs_json(layer.costs),
        "parameters_bytes": number(layer.parameters_bytes),
        "output_bytes": number(layer.output_bytes),
    }
    if layer.repeat is not None:
        document["repeat"] = layer.repeat
    if layer.recompute is not None:
        document["recompute"] = _costs_json(layer.recompute)
    return document


def _costs_json(costs: LayerCosts) -> dict[str, Any]:
    memory = costs.memory
    return {
        "forward": number(costs.forward),
        "backward_input": number(costs.backward_input),
        "backward_weight": number(costs.backward_weight),
        "backward": None if costs.backward is None else number(costs.backward),
        "memory": {
            "forward": number(memory.forward),
            "backward_input": number(memory.backward_input),
            "backward_weight": number(memory.backward_weight),
            "static": number(memory.static),
            "workspace": number(memory.workspace),
        },
    }


def layered_json(problem: LayeredProblem) -> dict[str, Any]:
    """A layered problem, normalised: every key present, layers as given."""
    document: dict[str, Any] = {
        "pp_degree": problem.pp_degree,
        "microbatches": problem.microbatches,
        "placement": problem.placement,
        "objective": problem.objective,
        "layers": [_layer_json(layer) for layer in problem.model.layers],
        "costs": {"p2p": number(problem.p2p)} if problem.link is None else {"link": link_json(problem.link)},
        "memory": {
            "static": numbers(problem.static),
            "limit": None if problem.limit is None else numbers(problem.limit),
        },
        "cut": _rules_json(problem.rules),
    }
    if problem.placement == "loop":
        document["chunks"] = problem.chunks or 2
    return {**document, **units_json(problem.units)}


def link_json(link: Link) -> dict[str, Any]:
    """A link as a JSON document."""
    return {"latency": number(link.latency), "bandwidth": number(link.bandwidth)}
