"""Times and losses of a run's latest steps, as SVG without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from zbv_solver.export import quantities
from zbv_solver.export.axis import ticks

from zbv_service.runs.steps import StepLine

_HEADROOM = 1.15
_TICKS = 5


@dataclass(frozen=True)
class Bar:
    """A step in the chart of step times, in percent of its area; y points downwards."""

    x: float
    y: float
    width: float
    height: float
    text: str


@dataclass(frozen=True)
class Piece:
    """A straight piece of the loss curve, in percent."""

    x1: float
    y1: float
    x2: float
    y2: float


@dataclass(frozen=True)
class Dot:
    """A step of the loss curve."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Level:
    """A number on the y axis, in percent from the top."""

    y: float
    text: str


@dataclass(frozen=True)
class StepChart:
    """Times of the latest steps; ``planned`` is the position of the planned time, None if unknown."""

    summary: str
    bars: tuple[Bar, ...]
    levels: tuple[Level, ...]
    planned: float | None
    first: int
    last: int


@dataclass(frozen=True)
class LossChart:
    """Losses of the latest steps."""

    summary: str
    pieces: tuple[Piece, ...]
    dots: tuple[Dot, ...]
    levels: tuple[Level, ...]
    first: int
    last: int


def duration(seconds: float) -> str:
    """Seconds in the unit that suits: ``51.2 ms``."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= scale:
            return f"{quantities.figure(seconds / scale)} {unit}"
    return f"{quantities.figure(seconds * 1e9)} ns"


def step_chart(lines: Sequence[StepLine], planned: float | None) -> StepChart:
    """The chart of one or more steps, in seconds, with the planned time if it is known."""
    top = _HEADROOM * max(*(line.seconds for line in lines), planned or 0.0) or 1.0
    slot = 100 / len(lines)

    def y(seconds: float) -> float:
        return round(100 * (1 - seconds / top), 3)

    bars = tuple(
        Bar(
            round((at + 0.14) * slot, 3),
            y(line.seconds),
            round(0.72 * slot, 3),
            round(100 - y(line.seconds), 3),
            f"step {line.step}: {duration(line.seconds)}",
        )
        for at, line in enumerate(lines)
    )
    least, most = (duration(pick(line.seconds for line in lines)) for pick in (min, max))
    told = f"Times of steps {lines[0].step} to {lines[-1].step}: {least} to {most}"
    return StepChart(
        summary=f"{told}{f'; planned {duration(planned)}' if planned else ''}.",
        bars=bars,
        levels=tuple(Level(y(at), duration(at) if at else "0") for at in ticks(top, _TICKS)),
        planned=None if planned is None else y(planned),
        first=lines[0].step,
        last=lines[-1].step,
    )


def loss_chart(lines: Sequence[StepLine]) -> LossChart | None:
    """The loss curve; None with fewer than two losses."""
    known = [(line.step, line.loss) for line in lines if line.loss is not None]
    if len(known) < 2:
        return None
    first, last = known[0][0], known[-1][0]
    low, high = min(loss for _, loss in known), max(loss for _, loss in known)
    pad = 0.12 * (high - low) or 0.05 * abs(high) or 1.0
    low, high = low - pad, high + pad
    places = [
        (
            round(100 * (step - first) / (last - first), 3),
            round(100 * (high - loss) / (high - low), 3),
            f"step {step}: loss {quantities.figure(loss)}",
        )
        for step, loss in known
    ]
    middle = (low + high) / 2
    return LossChart(
        summary=f"Loss from {quantities.figure(known[0][1])} at step {first} to "
        f"{quantities.figure(known[-1][1])} at step {last}.",
        pieces=tuple(Piece(a[0], a[1], b[0], b[1]) for a, b in pairwise(places)),
        dots=tuple(Dot(*place) for place in places),
        levels=tuple(
            Level(round(100 * (high - at) / (high - low), 3), quantities.figure(at, 3))
            for at in (low + pad, middle, high - pad)
        ),
        first=first,
        last=last,
    )
