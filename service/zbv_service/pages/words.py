"""Phrases that several pages share, among them those of layers; the templates use some as filters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

from markupsafe import Markup, escape
from zbv_solver.export import quantities
from zbv_solver.export.quantities import counted
from zbv_solver.problem.cut import CutRules
from zbv_solver.problem.layer import Layer
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.problem import Problem, Units

from zbv_service.plans.renderings import PlanFacts
from zbv_service.records.runs import RunDocument


def shape_of(problem: Problem | LayeredProblem | PlanFacts) -> str:
    """The size of a problem: ``4 ranks × 16 microbatches``."""
    return f"{counted(problem.pp_degree, 'rank')} × {counted(problem.microbatches, 'microbatch')}"


def placement_name(kind: str, chunks: int) -> str:
    """The name of a placement: ``V``, ``interleaved × 3``."""
    return {"v": "V", "single": "one stage per rank"}.get(kind, f"interleaved × {chunks}")


def moment(at: datetime) -> str:
    """A time in UTC, to the minute; naive times are in UTC already."""
    return (at if at.tzinfo is None else at.astimezone(UTC)).strftime("%Y-%m-%d %H:%M")


def clock(seconds: float) -> str:
    """Seconds that have passed, with tenths below 100: ``12.5 s``, ``3 min 05 s``, ``2 h 10 min``."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def grouped(names: Sequence[str]) -> str:
    """Names in order of their first occurrence, with counts: ``8 × NVIDIA H200, CPU``."""
    return ", ".join(name if n == 1 else f"{n} × {name}" for name, n in Counter(names).items())


def reached_step(run: RunDocument) -> int | None:
    """The step that every rank of a run has reached, counted from 0; None before all have reported one."""
    steps = [place.get("step") for node in run.members for place in node.ranks]
    known = [step for step in steps if step is not None]
    return min(known) if known and len(known) == len(steps) else None


NOTICEABLE = 0.05
"""Durations that differ by more than this share are marked."""
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


def tone(ratio: float) -> str:
    """``slow`` or ``fast`` if a measured duration differs noticeably from its plan, else empty."""
    return "slow" if ratio > 1 + NOTICEABLE else "fast" if ratio < 1 - NOTICEABLE else ""


def seconds(value: float | None) -> str:
    """A time in the unit that suits; ``–`` if there is none."""
    return "–" if value is None else quantities.time(value, quantities.SECONDS)


def marked(text: str) -> Markup:
    """Text whose words in backticks are code."""
    return Markup(re.sub(r"`+([^`]+)`+", r"<code>\1</code>", escape(text)))


def signed(value: float, units: Units | None = None) -> str:
    """A difference with its sign, and with its unit if units are given; 0 has no sign."""
    text = quantities.figure(value) if units is None else quantities.time(value, units)
    return f"+{text}" if value > 0 else text
