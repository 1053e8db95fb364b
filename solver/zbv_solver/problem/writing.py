"""Problems as JSON documents, normalised: every key present, every value in full."""

from __future__ import annotations

from typing import Any

from zbv_solver.documents.files import number, plain
from zbv_solver.problem.features import FIXED
from zbv_solver.problem.layer import Layer, Model, OnDevice
from zbv_solver.problem.layered_problem import AnyProblem, LayeredProblem
from zbv_solver.problem.problem import Problem


def any_problem_json(problem: AnyProblem) -> dict[str, Any]:
    """A problem, by stages or by layers, as a document."""
    return layered_json(problem) if isinstance(problem, LayeredProblem) else problem_json(problem)


def problem_json(problem: Problem) -> dict[str, Any]:
    """A problem, normalised: every key present, every value one per stage, boundary or rank."""
    document: dict[str, Any] = {
        "pp_degree": problem.pp_degree,
        "microbatches": problem.microbatches,
        "placement": problem.placement.kind,
        "objective": problem.objective,
        "costs": plain(problem.costs),
        "memory": plain(problem.memory),
    }
    if problem.features:
        document["features"] = {each.name: plain(each.value) for each in problem.features}
        _add_coefficients(document, problem)
    document["costs"]["p2p"] = document["costs"].pop("p2p")  # the last of the costs, as in docs/formats.md
    if problem.placement.kind == "loop":
        document["chunks"] = problem.placement.chunks
    if problem.model is not None:
        cut_model = problem.model
        document["layers"] = [_layer_json(layer) for layer in cut_model.model.layers]
        document["partition"] = plain(cut_model.partition)
        document |= _modules_json(cut_model.model)
        document["cut"] = plain(cut_model.rules)
        if cut_model.model.can_recompute:
            document["recompute"] = plain(cut_model.cut.recompute)
        document["memory"]["static_beside_layers"] = plain(cut_model.static)
        if (link := cut_model.links or cut_model.link) is not None:
            document["costs"]["link"] = plain(link)
        if cut_model.blocking:
            document["costs"] |= {"blocking": True} | ({} if link else {"p2p": number(cut_model.blocked)})
        if cut_model.devices:
            document["devices"] = plain(cut_model.devices)
    return document | _descriptions(problem)


def _add_coefficients(document: dict[str, Any], problem: Problem) -> None:
    """Make objects of the numbers that depend on features; the others stay lists."""
    for feature in problem.features:
        for (section, name), values in feature.coefficients.items():
            if any(values):
                fixed = document[section][name]
                amount = fixed if isinstance(fixed, dict) else {FIXED: fixed}
                document[section][name] = amount | {feature.name: plain(values)}


def layered_json(problem: LayeredProblem) -> dict[str, Any]:
    """A layered problem, normalised: every key present, layers as given."""
    link = problem.links or problem.link
    document: dict[str, Any] = {
        "pp_degree": problem.pp_degree,
        "microbatches": problem.microbatches,
        "placement": problem.placement,
        "objective": problem.objective,
        "layers": [_layer_json(layer) for layer in problem.model.layers],
        **_modules_json(problem.model),
        "costs": {"p2p": number(problem.p2p)} if link is None else {"link": plain(link)},
        "memory": {"static": plain(problem.static), "limit": plain(problem.limit)},
        "cut": plain(problem.rules),
    }
    if problem.blocking:
        document["costs"]["blocking"] = True
    if problem.devices:
        document["devices"] = plain(problem.devices)
    if problem.placement == "loop":
        document["chunks"] = problem.chunks or 2
    return document | _descriptions(problem)


def _descriptions(problem: AnyProblem) -> dict[str, Any]:
    """The keys ``units`` and ``measured``, each only if it says something."""
    units = {key: value for key, value in plain(problem.units).items() if value is not None}
    described = {"units": units} if any(units.values()) else {}
    return described | ({"measured": dict(problem.measured)} if problem.measured else {})


def _modules_json(model: Model) -> dict[str, Any]:
    return {"recompute_modules": list(model.recompute_modules)} if model.recompute_modules else {}


def _layer_json(layer: Layer) -> dict[str, Any]:
    document = {
        "name": layer.name,
        **plain(layer.costs),
        "parameters_bytes": number(layer.parameters_bytes),
        "output_bytes": number(layer.output_bytes),
    }
    if layer.repeat is not None:
        document["repeat"] = layer.repeat
    if layer.recompute is not None:
        document["recompute"] = plain(layer.recompute)
    if layer.on:
        document["on"] = {each.device: _on_device_json(each) for each in layer.on}
    return document


def _on_device_json(costs: OnDevice) -> dict[str, Any]:
    again = {} if costs.recompute is None else {"recompute": plain(costs.recompute)}
    return {**plain(costs.costs), **again}
