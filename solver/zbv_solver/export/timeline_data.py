"""A timeline for the script that draws it: its actions as packed columns, and what they all have in common.

``static/timeline.js`` reads both. Columns travel as one piece of binary data, because a plan reaches hundreds
of thousands of actions; facts are JSON.
"""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import numpy as np

from zbv_solver.export import palette, quantities
from zbv_solver.export.per_rank import accounts_for_memory
from zbv_solver.export.timeline import Timeline
from zbv_solver.problem.problem import LETTERS, Problem

MAX_GLYPHS = 8_000
"""Above this many visible actions the script draws their picture; below, a bar for each."""


def timeline_facts(line: Timeline, problem: Problem, *, is_measured: bool = False) -> dict[str, Any]:
    """What the script knows of a timeline beside its actions, as JSON takes it.

    Parameters
    ----------
    problem
        Whose placement, costs and memory the actions have.
    is_measured
        Whether actions took other times than the problem says: then their ends travel, too.
    """
    arrays, units = problem.arrays, problem.units
    scale, memory_unit = quantities.memory_scale(float(line.during.max(initial=0.0)), units)
    return {
        "count": len(line),
        "is_measured": is_measured,
        "microbatch_bytes": _microbatch_type(line).itemsize,
        "microbatches": problem.microbatches,
        "offset": line.offset.tolist(),
        "stages": [list(stages) for stages in problem.placement.stages_of],
        "durations": arrays.duration.tolist(),
        "transfers": arrays.latency.tolist(),
        "memory": {
            "deltas": arrays.delta.tolist(),
            "static": arrays.static.tolist(),
            "is_known": accounts_for_memory(problem),
            "scale": scale,
            "unit": memory_unit,
        },
        "time_unit": quantities.time_unit(units),
        "objective": problem.objective,
        "letters": LETTERS,
        "names": [palette.NAMES[letter] for letter in LETTERS],
        "fills": list(palette.KIND_FILLS),
        "inks": list(palette.KIND_INKS),
        "shades": palette.PALETTE_SHADES,
        "max_glyphs": MAX_GLYPHS,
    }


def timeline_bytes(line: Timeline, *, is_measured: bool = False) -> bytes:
    """The columns of n actions, one after the other, little-endian.

    start (n float64), where ``is_measured`` end (n float64), microbatch (n uint16, or uint32 where it must),
    letter (n uint8), chunk (n uint8).
    """
    columns = [line.start.astype("<f8")]
    if is_measured:
        columns.append(line.end.astype("<f8"))
    columns.append(line.microbatch.astype(_microbatch_type(line)))
    columns.append(line.letter.astype("u1"))
    columns.append(line.chunk.astype("u1"))
    return b"".join(column.tobytes() for column in columns)


def timeline_text(line: Timeline, *, is_measured: bool = False) -> str:
    """:func:`timeline_bytes` as Base64, for a page that carries its data itself."""
    return b64encode(timeline_bytes(line, is_measured=is_measured)).decode()


def _microbatch_type(line: Timeline) -> np.dtype[Any]:
    return np.dtype("<u2" if line.microbatch.max(initial=0) < 2**16 else "<u4")
