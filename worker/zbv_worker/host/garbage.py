"""Python's garbage collection, between steps instead of within them.

The automatic collection runs when enough objects were created, wherever the program is, and a full one visits
every object of torch. A rank that stops for it within a step delays every rank that needs its next tensor. So
it is off during training. After the first step, everything that exists (modules, code, the plan) is excluded
from collections; after every step the youngest objects are collected, and now and then all others.
"""

from __future__ import annotations

import gc

_FULL_EVERY = 100
"""Steps between collections of the objects that have survived some; they grow with the report."""


class GarbageCollection:
    """Collects between steps, for the duration of a ``with`` block; afterwards everything is as before.

    It concerns the whole process. If the automatic collection is off already, nothing changes.
    """

    def __init__(self) -> None:
        self._is_ours = False
        self._is_frozen = False
        self._steps = 0

    def __enter__(self) -> GarbageCollection:
        self._is_ours = gc.isenabled()
        if self._is_ours:
            gc.disable()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_frozen:
            gc.unfreeze()
        if self._is_ours:
            gc.enable()

    def step_done(self) -> None:
        """Call between steps."""
        if not self._is_ours:
            return
        self._steps += 1
        if self._steps == 1:
            gc.collect()
            if gc.get_freeze_count() == 0:  # otherwise unfreezing would undo someone else's freeze
                gc.freeze()
                self._is_frozen = True
        elif self._steps % _FULL_EVERY == 0:
            gc.collect()
        else:
            gc.collect(1)
