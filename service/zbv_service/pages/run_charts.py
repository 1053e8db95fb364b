"""Times and losses of a run's latest steps, as SVG without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from zbv_solver.export import quantities

from zbv_service.pages.charts import Box, Line, Tick, percent
from zbv_service.runs.steps import StepLine

_HEADROOM = 1.15
_TICKS = 5


@dataclass(frozen=True)
class Dot:
    """A step of the loss curve."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class StepChart:
    """Times of the latest steps; ``planned`` is the position of the planned time, None if unknown."""

    summary: str
    bars: tuple[Box, ...]
    levels: tuple[Tick, ...]
    planned: float | None
    first: int
    last: int


@dataclass(frozen=True)
class LossChart:
    """Losses of the latest steps."""

    summary: str
    pieces: tuple[Line, ...]
    dots: tuple[Dot, ...]
    levels: tuple[Tick, ...]
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
    slot = 1 / len(lines)

    def y(seconds: float) -> float:
        return percent(1 - seconds / top)

    least, most = (duration(pick(line.seconds for line in lines)) for pick in (min, max))
    summary = f"Times of steps {lines[0].step} to {lines[-1].step}: {least} to {most}"
    return StepChart(
        summary=f"{summary}{f'; planned {duration(planned)}' if planned else ''}.",
        bars=tuple(
            Box(
                percent((at + 0.14) * slot),
                y(line.seconds),
                percent(0.72 * slot),
                round(100 - y(line.seconds), 3),
                f"step {line.step}: {duration(line.seconds)}",
            )
            for at, line in enumerate(lines)
        ),
        levels=tuple(Tick(y(at), duration(at) if at else "0") for at in quantities.ticks(0.0, top, _TICKS)),
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

    def y(loss: float) -> float:
        return percent((high + pad - loss) / (high - low + 2 * pad))

    dots = [
        Dot(percent((step - first) / (last - first)), y(loss), f"step {step}: loss {quantities.figure(loss)}")
        for step, loss in known
    ]
    return LossChart(
        summary=f"Loss from {quantities.figure(known[0][1])} at step {first} to "
        f"{quantities.figure(known[-1][1])} at step {last}.",
        pieces=tuple(Line(a.x, a.y, b.x, b.y) for a, b in pairwise(dots)),
        dots=tuple(dots),
        levels=tuple(Tick(y(at), quantities.figure(at, 3)) for at in (low, (low + high) / 2, high)),
        first=first,
        last=last,
    )
