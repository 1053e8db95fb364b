"""What simulations of a plan and its baselines with varying durations found (docs/formats.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zbv_solver.documents.files import plain
from zbv_solver.jitter.noise import Jitter, jitter_json


@dataclass(frozen=True)
class Spans:
    """The time of an iteration over many scenarios, in the problem's time unit."""

    expected_span: float
    p95_span: float
    """Mean and 0.95 quantile, of iterations that follow each other back to back."""
    expected_makespan: float
    p95_makespan: float
    """The same of iterations that all ranks begin together."""


@dataclass(frozen=True)
class SimulatedBaseline:
    """A classical schedule in the same scenarios; ``fits`` says whether it keeps the memory limit."""

    name: str
    spans: Spans
    fits: bool


@dataclass(frozen=True)
class Simulation:
    """How a plan and its baselines behave when durations vary."""

    jitter: Jitter
    scenarios: int
    """Number of simulated iterations of every schedule."""
    seed: int
    """Of the random draws, which all schedules share."""
    spans: Spans
    baselines: tuple[SimulatedBaseline, ...]


def simulation_json(simulation: Simulation) -> dict[str, Any]:
    """A simulation as a JSON document."""
    return {
        "jitter": jitter_json(simulation.jitter),
        "scenarios": simulation.scenarios,
        "seed": simulation.seed,
        **plain(simulation.spans),
        "baselines": [
            {"name": each.name, **plain(each.spans), "fits": each.fits} for each in simulation.baselines
        ],
    }
