"""Layers that a search divides into stages, as pages show them: facts and a table."""

from __future__ import annotations

from dataclasses import dataclass

from zbv_solver.export import quantities
from zbv_solver.problem.cut import CutRules
from zbv_solver.problem.layer import Layer, LayerCosts, Model
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.problem import Units

from zbv_service.pages.views.words import placement_name

LISTED_LAYERS = 16
"""Longer tables are folded."""
_BYTES = Units(memory="bytes")


@dataclass(frozen=True)
class LayerLine:
    """A layer, or equal copies of it, as texts; empty texts for missing values.

    Attributes
    ----------
    fused
        The full backward where it is not I + W.
    recomputed
        The cost and memory of a microbatch if the layer's stage is recomputed.
    """

    name: str
    copies: str
    forward: str
    backward_input: str
    backward_weight: str
    fused: str
    holds: str
    static: str
    workspace: str
    output: str
    recomputed: str


@dataclass(frozen=True)
class LayersTable:
    """The layers of a model in order, and which columns have values."""

    lines: tuple[LayerLine, ...]
    unit: str
    count: int
    has_fused: bool
    has_workspace: bool
    has_recompute: bool

    @property
    def is_long(self) -> bool:
        """Whether the page folds it."""
        return len(self.lines) > LISTED_LAYERS


def layers_table(model: Model, units: Units) -> LayersTable:
    """The layers of a model as a table."""
    lines = tuple(_line(layer, units) for layer in model.layers)
    return LayersTable(
        lines,
        quantities.time_unit(units),
        model.n_layers,
        has_fused=any(line.fused for line in lines),
        has_workspace=any(line.workspace for line in lines),
        has_recompute=any(line.recomputed for line in lines),
    )


def facts_of_layers(problem: LayeredProblem) -> list[tuple[str, str]]:
    """The problem apart from its layers, as terms and values."""
    return [
        ("Layers", str(problem.model.n_layers)),
        ("Placement", _placement(problem)),
        ("Transfer", transfer_text(problem)),
        ("Memory limit", quantities.memories(problem.limit, problem.units)),
        *rules_of(problem.rules),
    ]


def transfer_text(problem: LayeredProblem) -> str:
    """The cost of a transfer: a time, or a latency and a bandwidth."""
    link, units = problem.link, problem.units
    if link is None:
        return quantities.time(problem.p2p, units) if problem.p2p else "none"
    per = f" per {quantities.time_unit(units)}" if units.time else " per unit of time"
    bandwidth = quantities.memory(link.bandwidth, _BYTES)
    return f"latency {quantities.time(link.latency, units)}, bandwidth {bandwidth}{per}"


def rules_of(rules: CutRules) -> list[tuple[str, str]]:
    """The constraints on the cut, as terms and values."""
    found = []
    if rules.together:
        groups = "; ".join(f"{group[0]} to {group[-1]}" for group in rules.together)
        found.append(("In one stage", groups))
    for name, count in (("First stage", rules.first), ("Last stage", rules.last)):
        if count is not None:
            found.append((name, quantities.counted(count, "layer")))
    if rules.allow_empty:
        found.append(("Empty stages", "allowed"))
    return found


def _placement(problem: LayeredProblem) -> str:
    if problem.placement != "auto":
        return placement_name(problem.placement, problem.placements[0].chunks)
    return "the best of " + ", ".join(placement_name(each.kind, each.chunks) for each in problem.placements)


def _line(layer: Layer, units: Units) -> LayerLine:
    costs, memory = layer.costs, layer.costs.memory
    return LayerLine(
        name=layer.name,
        copies="" if layer.repeat is None else f"× {layer.repeat}",
        forward=quantities.figure(costs.forward),
        backward_input=quantities.figure(costs.backward_input),
        backward_weight=quantities.figure(costs.backward_weight),
        fused="" if costs.backward is None else quantities.figure(costs.backward),
        holds=quantities.memory(memory.forward, units),
        static=quantities.memory(memory.static, units),
        workspace=quantities.memory(memory.workspace, units) if memory.workspace else "",
        output=quantities.memory(layer.output_bytes, _BYTES) if layer.output_bytes else "–",
        recomputed="" if layer.recompute is None else _recomputed(layer.recompute, costs, units),
    )


def _recomputed(other: LayerCosts, own: LayerCosts, units: Units) -> str:
    longer = other.forward + min(other.split, other.fused) - own.forward - min(own.split, own.fused)
    held = quantities.memory(other.memory.forward, units)
    return f"holds {held}, {quantities.time(longer, units)} longer"
