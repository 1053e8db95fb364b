"""The memory axis of a frontier: fractions of 1F1B's memory, or amounts if every limit has its own cut."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zbv_solver.export import quantities
from zbv_solver.export.axis import ticks
from zbv_solver.frontiers.limits import LARGEST, fits
from zbv_solver.problem.problem import Units

from zbv_service.frontier.points import Frontier

RIGHT = 0.04
"""Room beyond the last limit, as a share of the range."""
LEFT = 0.12
"""Room below the smallest limit, as a share of the range, if amounts do not start at 0."""
_TICKS = 8


@dataclass(frozen=True)
class Axis:
    """Its start, its last limit, and the units of its amounts (None for fractions)."""

    begin: float
    last: float
    units: Units | None

    @classmethod
    def of(cls, found: Frontier) -> Axis:
        """The axis of a frontier; with amounts, it includes what the plan itself needs."""
        if found.cuts is None:
            return cls(0.0, LARGEST, None)
        least, last = found.points[0].at, max(found.points[-1].at, found.own.needs)
        begin = max(0.0, least - LEFT * ((last - least) or last))
        return cls(begin, last, found.problem.units)

    @property
    def end(self) -> float:
        """The end of the axis."""
        return self.last + RIGHT * (self.last - self.begin)

    def shows(self, needs: float) -> bool:
        """Whether an amount is on the axis."""
        return fits(needs, self.last)

    def place(self, at: float) -> float:
        """The position of an amount, in percent."""
        inside = min(max(at, self.begin), self.end)
        return round(100 * (inside - self.begin) / (self.end - self.begin), 3)

    def said(self, at: float) -> str:
        """An amount: ``0.75 ×``, ``37.4 GiB``."""
        return times(at) if self.units is None else quantities.memory(at, self.units)

    def needs(self, at: float) -> str:
        """The memory that a schedule needs, as the end of a sentence."""
        if self.units is None:
            return f"needs {times(at)} 1F1B's memory"
        return f"needs {self.said(at)} on its fullest rank"

    @property
    def unit(self) -> str:
        """The unit of the numbers at its ticks; empty for fractions."""
        return self._scale[1]

    def ticks(self) -> list[tuple[float, str]]:
        """Round amounts on the axis with their texts."""
        scale, _ = self._scale
        step = ticks((self.last - self.begin) / scale, _TICKS)
        width = step[1] if len(step) > 1 else 1.0
        first = math.ceil(self.begin / scale / width - 1e-9)
        last = math.floor(self.last / scale / width + 1e-9)
        return [(width * count * scale, quantities.figure(width * count)) for count in range(first, last + 1)]

    @property
    def _scale(self) -> tuple[float, str]:
        return (1.0, "") if self.units is None else quantities.memory_scale(self.last, self.units)


def times(fraction: float) -> str:
    """A fraction of 1F1B's memory: ``0.75 ×``."""
    return f"{quantities.figure(fraction, 3)}\u202f×"
