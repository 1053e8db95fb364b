"""The canvas of a Gantt chart as the template lays it out, before the script draws on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zbv_solver.export import quantities

MEMORY_HEIGHT = 190
OVERVIEW_HEIGHT = 52
"""Heights of the canvases of memory and overview, in pixels."""
_ALL_ROWS = 640.0
_HIGHEST_ROW = 34.0
_LOWEST_ROW = 7.0
_TOP = 22
_AXIS = 42
_NO_AXIS = 8


@dataclass(frozen=True)
class GanttCanvas:
    """A canvas that reserves its height in the page; all lengths in pixels.

    Attributes
    ----------
    rows
        Height of the rows of all ranks together.
    top, bottom
        Room above the rows for the title, and below them for the time axis.
    axis
        What the time axis shows; None for a chart that leaves it to the one below.
    idle
        The idle share of every rank, separated by spaces; it stands at the right of the rows.
    """

    rows: int
    top: int
    bottom: int
    title: str
    axis: str | None
    idle: str

    @property
    def height(self) -> int:
        """Of the whole canvas."""
        return self.top + self.rows + self.bottom


def gantt_canvas(
    ranks: int,
    *,
    title: str = "",
    axis: str | None = None,
    idle: Sequence[float] = (),
    rows: float = _ALL_ROWS,
) -> GanttCanvas:
    """The canvas for a number of ranks; all rows together take about ``rows`` pixels.

    Few ranks take less, so that rows are not too high; many take more, so that a pointer can hit each.
    """
    return GanttCanvas(
        rows=round(min(_HIGHEST_ROW, max(_LOWEST_ROW, rows / ranks)) * ranks),
        top=_TOP,
        bottom=_NO_AXIS if axis is None else _AXIS,
        title=title,
        axis=axis,
        idle=" ".join(quantities.percent(share, 1) for share in idle),
    )
