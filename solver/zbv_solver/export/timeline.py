"""A plan laid out in time, for all charts and exports.

Start times are the earliest possible ones: every rank runs its list as soon as inputs arrive.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zbv_solver.export.palette import PALETTE_SHADES
from zbv_solver.kernels.arrays import FloatArray
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import LETTERS


@dataclass(frozen=True, eq=False)
class Timeline:
    """A plan's n actions as arrays in the flat order of its orders, rank after rank, ascending in time.

    Attributes
    ----------
    start, end
        (n,) float64, in the problem's time unit.
    rank, chunk, stage, microbatch
        (n,) int32.
    letter
        (n,) int8 codes, indices into ``LETTERS``.
    kind
        (n,) uint8, index into :data:`zbv_solver.export.palette.KIND_FILLS`.
    during, after
        (n,) float64, memory of the action's rank while it runs and when it has ended.
    """

    start: FloatArray
    end: FloatArray
    rank: NDArray[np.int32]
    chunk: NDArray[np.int32]
    stage: NDArray[np.int32]
    letter: NDArray[np.int8]
    microbatch: NDArray[np.int32]
    kind: NDArray[np.uint8]
    during: FloatArray
    after: FloatArray
    offset: NDArray[np.int64]

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
    )
