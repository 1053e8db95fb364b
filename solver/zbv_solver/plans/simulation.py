"""What simulations of a plan and its baselines with varying durations found (docs/formats.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zbv_solver.documents.text import plain
from zbv_solver.jitter.noise import Jitter, jitter_json


@dataclass(frozen=True)
class Spans:
    """The time of an iteration over many scenarios, in the problem's time unit.

    Attributes
    ----------
    expected_span, p95_span
        Mean and 0.95 quantile, of iterations that follow each other back to back.
    expected_makespan, p95_makespan
        The same of iterations that all ranks begin together.
    """

    expected_span: float
    p95_span: float
    expected_makespan: float
    p95_makespan: float


@dataclass(frozen=True)
class SimulatedBaseline:
    """A classical schedule in the same scenarios; ``fits`` says whether it keeps the memory limit."""

    name: str
    spans: Spans
    fits: bool


@dataclass(frozen=True)
class Simulation:
    """How a plan and its baselines behave when durations vary.

    Attributes
    ----------
    scenarios
        Number of simulated iterations of every schedule.
    seed
        Of the random draws, which all schedules share.
    """

    jitter: Jitter
    scenarios: int
    seed: int
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
