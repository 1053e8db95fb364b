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
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from queue import Empty, SimpleQueue
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
        self._load = load
        self._order = order
        self._ahead = ahead if order else 0
        self._pinned = pinned
        self._timeout = timeout
        self._last_step = last_step
        self._is_checked = False
        self._series: _Series | None = None

    def begin(self, step: int) -> Fetch:
        """Start a step; returns a function to be called once for each index of the order, in order."""
        if not self._ahead:
            return self._fetch
        series = self._series
        if series is None or series.next != (step, self._order[0]):
            self.close()
        return self._take

    def _fetch(self, step: int, index: int) -> Microbatch:
        return checked_microbatch(self._load(step, index))

    def close(self) -> None:
        """Stop the thread and discard what was fetched ahead.

        Raises
        ------
        WorkerError
            If the model does not return from the call in progress.
        """
        series, self._series = self._series, None
        if series is not None and not series.close(self._timeout):
            raise WorkerError(f"{series} did not return within {self._timeout:g} s.")

    def abandon(self) -> None:
        """Like :meth:`close`, but leave a thread behind that does not end."""
        series, self._series = self._series, None
        if series is not None:
            series.close(1.0)

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
        if self._series is None:
            last = step if self._last_step is None else self._last_step
            self._series = _Series(self._fetch, self._pinned, self._order, (step, index), last, self._ahead)
        return self._series.take(self._timeout)


class _Series:
    """Microbatches of consecutive steps, fetched by one thread.

    Attributes
    ----------
    next
        Step and index of the next microbatch to be taken; None after the last.
    """

    def __init__(
        self,
        fetch: Fetch,
        pinned: Callable[[Tensor], Tensor],
        order: Sequence[int],
        first: tuple[int, int],
        last_step: int,
        ahead: int,
    ):
        self._fetch = fetch
        self._pinned = pinned
        self._needs = _needs(order, first, last_step)
        self._taken = _needs(order, first, last_step)
        self.next = next(self._taken, None)
        self._fetched: SimpleQueue[Microbatch | BaseException] = SimpleQueue()
        self._room = threading.Semaphore(ahead)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="zbv-data", daemon=True)
        self._thread.start()

    def __str__(self) -> str:
        return "microbatch() of the model" if self.next is None else f"microbatch{self.next}"

    def take(self, timeout: float) -> Microbatch:
        """The next microbatch; raises what fetching it raised."""
        try:
            found = self._fetched.get(timeout=timeout)
        except Empty:
            raise WorkerError(
                f"{self} did not return within {timeout:g} s. If loading takes that long, raise --timeout."
            ) from None
        self._room.release()
        self.next = next(self._taken, None)
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self, timeout: float) -> bool:
        """Stop the thread; returns whether it has ended."""
        self._is_closed = True
        self._room.release()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        for step, index in self._needs:
            self._room.acquire()  # close() releases it
            if self._is_closed:
                return
            try:
                found = self._fetch(step, index)
                data: Microbatch | BaseException = Microbatch(
                    *(map_tensors(self._pinned, part) for part in found)
                )
            except BaseException as error:
                data = error
            self._fetched.put(data)
            if isinstance(data, BaseException):
                return


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
