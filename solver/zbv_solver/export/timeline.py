"""A plan laid out in time, for all charts and exports: as arrays, as pixels, and as data of a page's script.

Start times are the earliest possible ones: every rank runs its list as soon as inputs arrive. ``static/
timeline.js`` reads facts as JSON, and actions as packed columns of binary data, because a plan may have
hundreds of thousands of actions.
"""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zbv_solver.export import palette, quantities
from zbv_solver.export.palette import KIND_FILLS, PALETTE_SHADES, rgb
from zbv_solver.kernels.jit import FloatArray
from zbv_solver.plans.orders import durations
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import LETTERS, F, Problem, Units
from zbv_solver.timing.start_times import objective_of

MAX_GLYPHS = 8_000
"""With more visible actions the script draws an image of them, otherwise a bar for each."""


MAX_COPIES = 3 * MAX_GLYPHS
"""With more entries of copies, a page shows neither them nor memory over time."""


@dataclass(frozen=True, eq=False)
class Copied:
    """The k entries of copies to the host."""

    entries: NDArray[np.int32]
    """(k, 4), as in :class:`~zbv_solver.plans.orders.Orders`."""
    times: FloatArray
    """(k, 2), as from :func:`~zbv_solver.timing.start_times.copy_times`."""
    moved: tuple[float, ...]
    """(S,) the memory that one of them moves."""

    @property
    def facts(self) -> dict[str, Any]:
        """What the script knows about them, ready for JSON."""
        return {"entries": self.entries.tolist(), "times": self.times.tolist(), "moved": self.moved}


@dataclass(frozen=True, eq=False)
class Timeline:
    """A plan's n actions as arrays in the flat order of its orders, rank after rank, ascending in time."""

    start: FloatArray
    end: FloatArray
    """(n,) starts and ends, in the problem's time unit."""
    rank: NDArray[np.int32]
    chunk: NDArray[np.int32]
    stage: NDArray[np.int32]
    letter: NDArray[np.int8]
    """(n,) int8 codes, indices into ``LETTERS``."""
    microbatch: NDArray[np.int32]
    """(n,) int32, like rank, chunk and stage."""
    kind: NDArray[np.uint8]
    """(n,) uint8, index into :data:`zbv_solver.export.palette.KIND_FILLS`."""
    during: FloatArray
    after: FloatArray
    """(n,) memory of the action's rank while it runs, and when it has ended."""
    offset: NDArray[np.int64]
    has_pairs: bool = False
    """Whether some ends do not follow from starts and costs: a pair is one block with two halves."""
    has_copies: bool = False
    """Whether copies to the host change memory, too."""
    copies: Copied | None = None
    """These copies; None if there are none, more than are shown, or their times are not known."""

    def __len__(self) -> int:
        return len(self.start)

    @property
    def pp_degree(self) -> int:
        """Number of ranks."""
        return len(self.offset) - 1

    @property
    def makespan(self) -> float:
        """Last end; the first start is 0."""
        return float(self.end.max(initial=0.0))

    def slice_of(self, rank: int) -> slice:
        """Where a rank's actions lie in the arrays."""
        return slice(int(self.offset[rank]), int(self.offset[rank + 1]))

    def text(self, index: int) -> str:
        """An action as text, ``7I3``."""
        return f"{self.stage[index]}{LETTERS[self.letter[index]]}{self.microbatch[index]}"


def timeline(plan: Plan) -> Timeline:
    """Lay a plan out in time.

    Raises
    ------
    InvalidPlan
        When the plan's orders cannot be executed.
    """
    from zbv_solver.timing.start_times import (  # loads numba: only drawing needs it
        earliest_times,
        memory_profile,
    )

    orders = plan.orders
    start, end = earliest_times(plan.problem, orders)
    if orders.paired is not None:
        first = np.flatnonzero(orders.paired)
        end[first] = start[first + 1] = (start[first] + end[first]) / 2
    during, after = memory_profile(plan.problem, orders)
    chunk = np.array(plan.problem.placement.chunk_of, dtype=np.int32)[orders.stage]
    return Timeline(
        start=start,
        end=end,
        rank=orders.rank_index(),
        chunk=chunk,
        stage=orders.stage,
        letter=orders.letter,
        microbatch=orders.microbatch,
        kind=(PALETTE_SHADES * orders.letter.astype(np.int32) + chunk % PALETTE_SHADES).astype(np.uint8),
        during=during,
        after=after,
        offset=orders.offset,
        has_pairs=orders.paired is not None,
        has_copies=orders.copies is not None,
        copies=_copied(plan),
    )


def _copied(plan: Plan) -> Copied | None:
    from zbv_solver.timing.start_times import copy_times  # loads numba

    orders, copies = plan.orders, plan.problem.copies
    if orders.copies is None or copies is None or len(orders.copies) > MAX_COPIES:
        return None
    return Copied(orders.copies, copy_times(plan.problem, orders), copies.offloadable)


def coverage(line: Timeline, columns: int) -> NDArray[np.float32]:
    """Share of every time column that each rank spends on each kind of action.

    Returns
    -------
    (p, columns, kinds) float32 from 0 to 1; what the kinds leave of 1 is idle time.
    """
    shares = np.zeros((line.pp_degree, columns, len(KIND_FILLS)), dtype=np.float32)
    width = line.makespan / columns
    if width <= 0:
        return shares
    edges = np.linspace(0.0, line.makespan, columns + 1)
    for rank in range(line.pp_degree):
        part = line.slice_of(rank)
        if part.start == part.stop:
            continue
        start, end, kinds = line.start[part], line.end[part], line.kind[part]
        # Time spent on a kind up to t is piecewise linear with knots at starts and ends.
        knots = np.stack([start, end], axis=1).ravel()
        for kind in np.unique(kinds):
            spent = np.cumsum(np.where(kinds == kind, end - start, 0.0))
            values = np.stack([np.concatenate(([0.0], spent[:-1])), spent], axis=1).ravel()
            shares[rank, :, kind] = np.diff(np.interp(edges, knots, values)) / width
    return shares


def image(line: Timeline, columns: int) -> NDArray[np.uint32]:
    """The schedule as RGBA pixels (p, columns), one row per rank, idle time transparent.

    It is for when actions are too many or too thin to be drawn one by one.
    """
    shares = coverage(line, columns)
    fills = np.array([rgb(fill) for fill in KIND_FILLS], dtype=np.float32)
    busy = np.clip(shares.sum(axis=2), 0.0, 1.0)
    colour = (shares @ fills) / np.maximum(busy, 1e-6)[..., None]
    pixels = np.empty((*busy.shape, 4), dtype=np.uint8)
    pixels[..., :3] = np.clip(np.rint(colour), 0, 255)
    pixels[..., 3] = np.rint(255 * busy)
    return pixels.view(np.uint32)[..., 0]


def accounts_for_memory(problem: Problem) -> bool:
    """Whether the problem has memory costs."""
    memory = problem.memory
    return memory.limit is not None or holds_memory(problem)


def shows_memory(line: Timeline, problem: Problem) -> bool:
    """Whether a page can show the memory over time."""
    return accounts_for_memory(problem) and (line.copies is not None or not line.has_copies)


def holds_memory(problem: Problem) -> bool:
    """Whether a rank ever holds memory."""
    return bool(problem.arrays.delta[F].any()) or any(problem.memory.static)


def idle_shares(plan: Plan) -> list[float]:
    """The share of the span that each rank (p,) is idle: 1 - busy / span. Their mean is the bubble rate."""
    orders, span = plan.orders, plan.metrics.span
    if span <= 0:
        return [0.0] * orders.pp_degree
    busy = np.bincount(
        orders.rank_index(), weights=durations(plan.problem, orders), minlength=orders.pp_degree
    )
    return [float(share) for share in 1 - busy / span]


@dataclass(frozen=True)
class PairSavings:
    """What pairs do for a plan."""

    paired: int
    forwards: int
    """F's in pairs, and all of them."""
    saved: float
    alone: float
    """How much shorter the objective is than if the actions of all pairs ran one after the other in this
    order, and that objective."""

    def text(self, units: Units) -> str:
        """A sentence."""
        paired, forwards = quantities.figure(self.paired, 12), quantities.figure(self.forwards, 12)
        time = quantities.timer(self.alone, units)
        saved = f", which saves {time(self.saved)} of {time(self.alone)}" if self.paired else ""
        return f"{paired} of {forwards} forwards run together with a backward{saved}"


def pair_savings(plan: Plan) -> PairSavings | None:
    """What pairs save; None if the problem has no pairs."""
    problem, orders = plan.problem, plan.orders
    if problem.communication is None:
        return None
    paired = 0 if orders.paired is None else int(np.count_nonzero(orders.paired))
    alone = objective_of(problem, orders.without_pairs()) if paired else plan.objective
    forwards = int(np.count_nonzero(orders.letter == F))
    return PairSavings(paired, forwards, alone - plan.objective, alone)


def timeline_facts(line: Timeline, problem: Problem, *, is_measured: bool = False) -> dict[str, Any]:
    """What the script knows about a timeline apart from its actions, ready for JSON.

    Parameters
    ----------
    problem
        Gives the placement, costs and memory of the actions.
    is_measured
        Whether the times were measured, for this and for :func:`timeline_bytes`.
    """
    arrays, units = problem.arrays, problem.units

    def by_kind(table: FloatArray) -> Any:
        return (table[..., 0] if problem.is_equal else table).tolist()

    scale, memory_unit = quantities.memory_scale(float(line.during.max(initial=0.0)), units)
    return {
        "count": len(line),
        "is_measured": is_measured,
        "has_ends": is_measured or line.has_pairs,
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
            "is_known": shows_memory(line, problem),
            "scale": scale,
            "unit": memory_unit,
        },
        "copies": None if line.copies is None else line.copies.facts,
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

    start (n float64), with measured times or pairs end (n float64), microbatch (n uint16, or n uint32 if 16
    bits are too few), letter (n uint8), chunk (n uint8).
    """
    columns = [line.start.astype("<f8")]
    if is_measured or line.has_pairs:
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
