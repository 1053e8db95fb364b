"""Problems as JSON documents, normalised: every key present, every value in full."""

from __future__ import annotations

from typing import Any

from zbv_solver.documents.files import number, plain
from zbv_solver.problem.cut import CutModel
from zbv_solver.problem.layer import Layer, LayerCosts, OnDevice
from zbv_solver.problem.layered_problem import AnyProblem, LayeredProblem
from zbv_solver.problem.problem import Problem
from zbv_solver.problem.stages import COMMUNICATION, FIXED


def any_problem_json(problem: AnyProblem) -> dict[str, Any]:
    """A problem, by stages or by layers, as a document."""
    return layered_json(problem) if isinstance(problem, LayeredProblem) else problem_json(problem)


def problem_json(problem: Problem) -> dict[str, Any]:
    """A problem, normalised: every key present, every value one per stage, boundary or rank."""
    costs, memory, cut = plain(problem.costs), plain(problem.memory), problem.model
    costs["p2p"] = costs.pop("p2p")  # after the durations, as in docs/formats.md
    hidden = None if problem.communication is None else plain(problem.communication)
    amounts_of = {"costs": costs, "memory": memory, COMMUNICATION: hidden}
    if hidden is not None:
        costs |= {"communication": hidden, "pair_factor": number(problem.pair_factor)}
    if (copies := problem.copies) is not None:
        costs |= {"offload": plain(copies.offload), "reload": plain(copies.reload)}
        memory |= {"offloadable": plain(copies.offloadable), "host_limit": plain(copies.host_limit)}
    more: dict[str, Any] = {}
    if problem.features:
        more["features"] = {each.name: plain(each.value) for each in problem.features}
    for feature in problem.features:
        for (section, name), values in feature.coefficients.items():
            if any(values):
                amounts = amounts_of[section]
                fixed = amounts[name] if isinstance(amounts[name], dict) else {FIXED: amounts[name]}
                amounts[name] = fixed | {feature.name: plain(values)}
    if cut is not None:
        more["partition"] = plain(cut.partition)
        if cut.model.can_recompute:
            more["recompute"] = plain(cut.cut.recompute)
        memory["static_beside_layers"] = plain(cut.static)
        if cut.blocking and not cut.links and cut.link is None:
            costs["p2p"] = number(cut.blocked)
    return _document(problem, problem.placement.kind, problem.placement.chunks, costs, memory, cut) | more


def layered_json(problem: LayeredProblem) -> dict[str, Any]:
    """A layered problem, normalised: every key present, layers as given."""
    costs: dict[str, Any] = {} if problem.links or problem.link else {"p2p": number(problem.p2p)}
    if problem.has_pairs:
        costs["pair_factor"] = number(problem.pair_factor)
    memory = {"static": plain(problem.static), "limit": plain(problem.limit)}
    if problem.host is not None:
        memory["host_limit"] = plain(problem.host_limit)
    return _document(problem, problem.placement, problem.chunks or 2, costs, memory, problem)


def _document(
    problem: AnyProblem,
    placement: str,
    chunks: int,
    costs: dict[str, Any],
    memory: dict[str, Any],
    source: CutModel | LayeredProblem | None,
) -> dict[str, Any]:
    """The keys that problems by stages and by layers share; ``source`` has the layers, if there are any."""
    document: dict[str, Any] = {
        "pp_degree": problem.pp_degree,
        "microbatches": problem.microbatches,
        "placement": placement,
        "objective": problem.objective,
        "costs": costs,
        "memory": memory,
    }
    if placement == "loop":
        document["chunks"] = chunks
    if source is not None:
        document["layers"] = [_layer_json(layer) for layer in source.model.layers]
        document["cut"] = plain(source.rules)
        if source.model.recompute_modules:
            document["recompute_modules"] = plain(source.model.recompute_modules)
        if (link := source.links or source.link) is not None:
            costs["link"] = plain(link)
        if source.blocking:
            costs["blocking"] = True
        if source.host is not None:
            costs["host_link"] = plain(source.host)
        if source.devices:
            document["devices"] = plain(source.devices)
    units = {key: value for key, value in plain(problem.units).items() if value is not None}
    if any(units.values()):
        document["units"] = units
    if problem.measured:
        document["measured"] = dict(problem.measured)
    return document


def _layer_json(layer: Layer) -> dict[str, Any]:
    document = {
        "name": layer.name,
        **_costs_json(layer),
        "parameters_bytes": number(layer.parameters_bytes),
        "output_bytes": number(layer.output_bytes),
    }
    if layer.repeat is not None:
        document["repeat"] = layer.repeat
    if layer.on:
        document["on"] = {each.device: _costs_json(each) for each in layer.on}
    return document


def _costs_json(of: Layer | OnDevice) -> dict[str, Any]:
    again = {} if of.recompute is None else {"recompute": _own_costs_json(of.recompute)}
    return {**_own_costs_json(of.costs), **again}


def _own_costs_json(costs: LayerCosts) -> dict[str, Any]:
    """The costs without the key that only layers with communication have."""
    document: dict[str, Any] = plain(costs)
    if costs.communication is None:
        del document["communication"]
    return document
