"""A timeline for the script that draws it: facts as JSON, and actions as packed columns.

``static/timeline.js`` reads both. The columns are binary data, because a plan may have hundreds of
thousands of actions.
"""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import numpy as np

from zbv_solver.export import palette, quantities
from zbv_solver.export.per_rank import accounts_for_memory
from zbv_solver.export.timeline import Timeline
from zbv_solver.kernels.arrays import FloatArray
from zbv_solver.problem.problem import LETTERS, Problem

MAX_GLYPHS = 8_000
"""With more visible actions the script draws an image of them, otherwise a bar for each."""


def timeline_facts(line: Timeline, problem: Problem, *, is_measured: bool = False) -> dict[str, Any]:
    """What the script knows about a timeline apart from its actions, ready for JSON.

    Parameters
    ----------
    problem
        Gives the placement, costs and memory of the actions.
    is_measured
        Whether the times were measured. If so, :func:`timeline_bytes` must contain the ends of actions.
    """
    arrays, units = problem.arrays, problem.units

    def by_kind(table: FloatArray) -> Any:
        return (table[..., 0] if problem.is_equal else table).tolist()

    scale, memory_unit = quantities.memory_scale(float(line.during.max(initial=0.0)), units)
    return {
        "count": len(line),
        "is_measured": is_measured,
        "microbatch_bytes": _microbatch_type(line).itemsize,
        "microbatches": problem.microbatches,
        "features": [[each.name, each.value] for each in problem.features],
        "kind_of": None if problem.is_equal else arrays.kind_of.tolist(),
        "offset": line.offset.tolist(),
        "stages": [list(stages) for stages in problem.placement.stages_of],
        "durations": by_kind(arrays.duration),
        "transfers": by_kind(arrays.latency),
        "memory": {
            "deltas": by_kind(arrays.delta),
            "static": arrays.static.tolist(),
            "limits": sorted(set(problem.memory.limit or ())),
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

    start (n float64), if ``is_measured`` end (n float64), microbatch (n uint16, or n uint32 if 16 bits are
    too few), letter (n uint8), chunk (n uint8).
    """
    columns = [line.start.astype("<f8")]
    if is_measured:
        columns.append(line.end.astype("<f8"))
    columns.append(line.microbatch.astype(_microbatch_type(line)))
    columns.append(line.letter.astype("u1"))
    columns.append(line.chunk.astype("u1"))
    return b"".join(column.tobytes() for column in columns)


def timeline_text(line: Timeline, *, is_measured: bool = False) -> str:
    """:func:`timeline_bytes` as Base64, for a page that contains its data."""
    return b64encode(timeline_bytes(line, is_measured=is_measured)).decode()


def _microbatch_type(line: Timeline) -> np.dtype[Any]:
    return np.dtype("<u2" if line.microbatch.max(initial=0) < 2**16 else "<u4")
