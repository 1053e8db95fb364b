"""Fetches microbatches on a thread before the rank's list needs them, and pins their tensors for copies to a
GPU.

The thread follows the list's order and stays a fixed number of microbatches ahead, across steps if that is
allowed. An error surfaces at the action that needs the data. Data that uses the global random number
generators cannot be fetched on a thread, because dropout draws from the same ones. So the first microbatch is
fetched on the launching thread, and if that changes a generator, so are all others.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from zbv_worker.errors import WorkerError
from zbv_worker.execution.rank_plan import Instruction
from zbv_worker.host.process import say
from zbv_worker.model.checks import checked_microbatch
from zbv_worker.model.protocol import FetchedAhead, Microbatch
from zbv_worker.values.structure import map_tensors

Load = Callable[[int, int], Microbatch | tuple[Any, ...]]
"""A model's method: takes step and index."""

Fetch = Callable[[int, int], Microbatch]
"""Takes step and index."""

DEFAULT_FETCH_AHEAD = 4
"""Microbatches held ahead on GPUs, in pinned host memory: as many as the host is ahead of the device."""


def fetched_ahead(model: object, device: torch.device) -> int:
    """How many microbatches to fetch ahead, by the model's choice or the default of the device."""
    if isinstance(model, FetchedAhead):
        return model.fetch_ahead
    return DEFAULT_FETCH_AHEAD if device.type == "cuda" else 0


def order_of_need(program: Iterable[Instruction], stages: Collection[int]) -> tuple[int, ...]:
    """The microbatches whose data some stages of a rank's list need, in the order of their first use."""
    actions = (instruction.action for instruction in program)
    needed = (a.microbatch for a in actions if a.letter == "F" and a.stage in stages)
    return tuple(dict.fromkeys(needed))


class FetchAhead:
    """The data of one rank's steps.

    Parameters
    ----------
    order
        The indices that every step needs.
    ahead
        The most microbatches fetched and not yet taken; 0 to fetch each on the launching thread when needed.
    pinned
        Applied to every tensor on the fetching thread.
    timeout
        Seconds to wait for one microbatch.
    last_step
        The last step that may be fetched; None for the current one.
    """

    def __init__(
        self,
        load: Load,
        order: Sequence[int],
        ahead: int,
        pinned: Callable[[Tensor], Tensor],
        timeout: float,
        last_step: int | None,
    ):
        self._load, self._order, self._pinned = load, order, pinned
        self._ahead = ahead if order else 0
        self._timeout, self._last_step = timeout, last_step
        self._is_checked = False
        self._pool: ThreadPoolExecutor | None = None
        self._needs: Iterator[tuple[int, int]] = iter(())
        self._fetched: deque[tuple[tuple[int, int], Future[Microbatch]]] = deque()

    def begin(self, step: int) -> Fetch:
        """Start a step; returns a function to be called once for each index of the order, in order."""
        if not self._ahead:
            return self._fetch
        if self._fetched and self._fetched[0][0] != (step, self._order[0]):
            self.close()
        return self._take

    def close(self) -> None:
        """Stop the thread and discard what was fetched ahead.

        Raises
        ------
        WorkerError
            If the model does not return from the call in progress.
        """
        place = self._fetched[0][0] if self._fetched else ""
        if not self._stop(self._timeout):
            raise WorkerError(f"microbatch{place} did not return within {self._timeout:g} s.")

    def abandon(self) -> None:
        """Like :meth:`close`, but leave a thread behind that does not end."""
        self._stop(1.0)

    def _stop(self, timeout: float) -> bool:
        pool, self._pool = self._pool, None
        futures = [future for _, future in self._fetched if not future.cancel()]
        self._fetched.clear()
        if pool is None:
            return True
        running = wait(futures, timeout).not_done
        pool.shutdown(wait=not running)
        return not running

    def _fetch(self, step: int, index: int) -> Microbatch:
        return checked_microbatch(self._load(step, index))

    def _fetch_pinned(self, step: int, index: int) -> Microbatch:
        return Microbatch(*(map_tensors(self._pinned, part) for part in self._fetch(step, index)))

    def _take(self, step: int, index: int) -> Microbatch:
        if not self._is_checked:
            self._is_checked = True
            data, is_pure = _observed(self._fetch, step, index)
            if not is_pure:
                self._ahead = 0
                say(
                    "microbatch() uses a global random number generator, so data is not fetched ahead. Use a "
                    "torch.Generator seeded with step and index."
                )
            return data
        if not self._ahead:  # found out within this step
            return self._fetch(step, index)
        if not self._fetched:
            last = step if self._last_step is None else self._last_step
            self._needs = _needs(self._order, (step, index), last)
            self._fetch_more(1)
        (_, future) = self._fetched.popleft()
        self._fetch_more(self._ahead)
        if wait([future], self._timeout).not_done:
            self._fetched.appendleft(((step, index), future))
            raise WorkerError(
                f"microbatch({step}, {index}) did not return within {self._timeout:g} s. If loading takes "
                f"that long, raise --timeout."
            )
        return future.result()

    def _fetch_more(self, count: int) -> None:
        """Have ``count`` microbatches that are fetched, or soon will be, as far as steps need some."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "zbv-data")
        for place in islice(self._needs, count - len(self._fetched)):
            self._fetched.append((place, self._pool.submit(self._fetch_pinned, *place)))


def _needs(order: Sequence[int], first: tuple[int, int], last_step: int) -> Iterator[tuple[int, int]]:
    """Step and index of everything needed from ``first`` to the end of the last step."""
    step, index = first
    yield from ((step, each) for each in order[order.index(index) :])
    for later in range(step + 1, last_step + 1):
        yield from ((later, each) for each in order)


def _observed(fetch: Fetch, step: int, index: int) -> tuple[Microbatch, bool]:
    """Fetch a microbatch; returns it and whether it left the global random number generators alone."""
    before = _random_states()
    data = fetch(step, index)
    return data, _random_states() == before


def _random_states() -> list[Any]:
    """The states of all global generators on the host, in comparable form."""
    states: list[Any] = [torch.get_rng_state().numpy().tobytes(), random.getstate()]
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states += [name, keys.tobytes(), rest]
    return states
