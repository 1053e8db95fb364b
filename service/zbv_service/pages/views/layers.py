"""Layers that a search divides into stages, as texts."""

from __future__ import annotations

from zbv_solver.export import quantities
from zbv_solver.problem.cut import CutRules
from zbv_solver.problem.layer import Layer
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.problem import Units

from zbv_service.pages.views.words import placement_name

BYTES = Units(memory="bytes")


def facts_of_layers(problem: LayeredProblem) -> list[tuple[str, str]]:
    """The problem apart from its layers, as terms and values."""
    return [
        ("Layers", str(problem.model.n_layers)),
        ("Placement", _placement(problem)),
        *([("Devices", ", ".join(problem.devices))] if problem.devices else []),
        ("Transfer", transfer_text(problem)),
        ("Memory limit", quantities.memories(problem.limit, problem.units)),
        *rules_of(problem.rules),
    ]


def transfer_text(problem: LayeredProblem) -> str:
    """The cost of a transfer: a time, or a latency and a bandwidth."""
    link, units = problem.link, problem.units
    if problem.links:
        return "one link per rank"
    if link is None:
        return quantities.time(problem.p2p, units) if problem.p2p else "none"
    per = f" per {quantities.time_unit(units)}" if units.time else " per unit of time"
    bandwidth = quantities.memory(link.bandwidth, BYTES)
    return f"latency {quantities.time(link.latency, units)}, bandwidth {bandwidth}{per}"


def rules_of(rules: CutRules) -> list[tuple[str, str]]:
    """The constraints on the cut, as terms and values."""
    found = []
    if rules.together:
        groups = "; ".join(f"{group[0]} to {group[-1]}" for group in rules.together)
        found.append(("In one stage", groups))
    for name, count in (("First stage", rules.first), ("Last stage", rules.last)):
        if count is not None:
            found.append((name, quantities.counted(count, "transformer layer")))
    if rules.allow_empty:
        found.append(("Empty stages", "allowed"))
    return found


def _placement(problem: LayeredProblem) -> str:
    if problem.placement != "auto":
        return placement_name(problem.placement, problem.placements[0].chunks)
    return "the best of " + ", ".join(placement_name(each.kind, each.chunks) for each in problem.placements)


def recomputed(layer: Layer, units: Units) -> str:
    """The memory and time of a microbatch if the layer's stage is recomputed; empty if it cannot be."""
    if layer.recompute is None:
        return ""
    own, other = layer.costs, layer.recompute
    longer = other.forward + min(other.split, other.fused) - own.forward - min(own.split, own.fused)
    held = quantities.memory(other.memory.forward, units)
    return f"holds {held}, {quantities.time(longer, units)} longer"
