"""How much room a plan's chart takes, in pixels: known before Bokeh, which takes a second to load."""

from __future__ import annotations

ALL_ROWS = 640.0
_HIGHEST_ROW = 34.0
_LOWEST_ROW = 7.0
AXES_HEIGHT = 88
"""Of a Gantt chart's toolbar and time axis."""
MEMORY_HEIGHT = 210
OVERVIEW_HEIGHT = 58
SPACING = 2


def rows_height(ranks: int, height: float = ALL_ROWS) -> int:
    """Of the rows of all ranks together: ``height``, less where ranks are few, more where they are many."""
    return round(min(_HIGHEST_ROW, max(_LOWEST_ROW, height / ranks)) * ranks)


def chart_height(ranks: int, *, has_memory: bool) -> int:
    """Of Gantt chart, memory lines and overview, one under the other."""
    memory = MEMORY_HEIGHT + SPACING if has_memory else 0
    return rows_height(ranks) + AXES_HEIGHT + SPACING + memory + OVERVIEW_HEIGHT
