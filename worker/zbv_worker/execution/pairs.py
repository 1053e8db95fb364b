"""Runs the pairs of a rank's list: takes both inputs, runs the halves, and passes both outputs on.

Everything that the ranks send each other stays on the rank's own thread. Only the two actions themselves run
together, if both have collectives (:mod:`zbv_worker.execution.turns`); otherwise there is nothing to hide,
and they run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from zbv_solver.plans.orders import Action

from zbv_worker.errors import ModelError
from zbv_worker.execution.binding import Bound, BoundPair, Computation, not_received, send_failed
from zbv_worker.execution.timeline import CudaTimeline, Patience, Queued, QueuedWork, Record, Timeline
from zbv_worker.execution.turns import Half, Interruptible, Overlap, in_turns, notice_collectives
from zbv_worker.failures.progress import CurrentProgress
from zbv_worker.values.structure import bytes_of, tensors_of


class Pairs:
    """Runs the pairs of one rank.

    Parameters
    ----------
    stages
        By index.
    queued
        What a GPU has not completed; None on the CPU.
    check
        Raises an error if an earlier send has failed.
    done
        See ``on_stage_done`` of :class:`zbv_worker.execution.executor.ExecutorOptions`.
    overlap
        Runs a pair; by default :func:`in_turns` if both halves have collectives.
    """

    def __init__(
        self,
        stages: Mapping[int, Computation],
        device: torch.device,
        timeline: Timeline,
        rank: int,
        *,
        progress: CurrentProgress,
        queued: Queued | None,
        check: Callable[[], None],
        done: Callable[[int], None] | None,
        overlap: Overlap | None,
    ):
        self.stages, self.device = stages, device
        self._timeline, self._rank = timeline, rank
        self._progress, self._queued, self._check, self._done = progress, queued, check, done
        self._overlap = overlap
        self._collectives: dict[tuple[int, str], int] = {}
        self._streams = _Streams(timeline, device) if isinstance(timeline, CudaTimeline) else None
        self._step = 0
        notice_collectives()

    def collectives(self, action: Action) -> int:
        """How many collectives this action of the stage started when it last ran in a pair; 0 before."""
        return self._collectives.get((action.stage, action.letter), 0)

    def turn_to(self, half: Half) -> None:
        """Note which half runs."""
        self._progress.now = (self._step, half.bound.instruction)

    def mark(self) -> Any:
        """A mark of the stream that this thread queues on."""
        return self._timeline.mark_here()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which this thread queues on a stream of a pair."""
        return nullcontext() if self._streams is None or stream is None else self._streams.cuda.stream(stream)

    def walk(self, pair: BoundPair, walk: int, step: int, patience: Patience) -> list[Record]:
        """Take both inputs, run the halves, and pass their outputs on; raises like a step."""
        self._step = step
        halves = [self._half(bound, patience) for bound in pair]
        forward, backward = halves
        overlap = self._overlap
        is_new = any(_kind(half) not in self._collectives for half in halves)
        if overlap is None:
            overlaps = forward.has_collectives and backward.has_collectives
            overlap = in_turns if overlaps else _one_by_one
        # The first pairs already use the memory of both streams, as long as tensors pass through the host.
        streams = None if overlap is _one_by_one and not is_new else self._streams
        with nullcontext() if streams is None else streams.dividing(walk, forward, backward):
            overlap(forward, backward)
        for half in halves:
            if not half.is_done:
                raise ModelError(
                    f"the function for pairs did not run {half.action}; it must call both halves once, and "
                    f"wait until they have ended."
                )
        return [self._completed(half, walk, step, patience) for half in halves]

    def _half(self, bound: Bound, patience: Patience) -> Half:
        """Take an input."""
        instruction, progress = bound.instruction, self._progress
        progress.now = (self._step, instruction)
        if self._queued is not None:
            self._queued.make_room()
        wait, value = self._timeline.mark(), None
        try:
            self._check()
        except (TimeoutError, ConnectionError) as error:
            raise send_failed(error, self._rank, instruction) from error
        if bound.take is not None:
            progress.waiting_for = instruction.peer
            try:
                value = bound.take()
            except (TimeoutError, ConnectionError) as error:
                if instruction.peer is None:  # an error of the user's data
                    raise
                raise not_received(error, self._rank, instruction, patience) from error
            progress.waiting_for = None
        return Half(self, bound, wait, value)

    def _completed(self, half: Half, walk: int, step: int, patience: Patience) -> Record:
        """Pass an output on."""
        instruction, action = half.bound.instruction, half.action
        self._collectives[_kind(half)] = half.collectives
        if self._queued is not None:
            self._queued.add(QueuedWork(walk, step, instruction, half.start, half.end, patience))
        if half.bound.pass_on is not None:
            try:
                half.bound.pass_on(half.output)
            except (TimeoutError, ConnectionError) as error:
                raise send_failed(error, self._rank, instruction) from error
        if self._done is not None and instruction.completes_stage:
            self._done(action.stage)
        received = 0 if instruction.peer is None else bytes_of(half.value)
        return Record(action, half.wait, half.start, half.end, received)


def _one_by_one(forward: Half, backward: Half) -> None:
    forward()
    backward()


class _Streams:
    """The two streams of pairs on a GPU: the compute stream and one more.

    Autograd runs a backward on the stream of its F. So an F that runs together with a backward takes the
    other stream, and its own backward takes that one too. Between pairs the compute stream waits for the
    other one, which waits for it before the next pair. So memory may be freed on any stream between pairs; a
    half's input is used by the one stream and freed by the other within a pair, and is recorded.
    """

    def __init__(self, timeline: CudaTimeline, device: torch.device):
        self.cuda, self._device = timeline.cuda, device
        self._second: Any = None
        self._walk = -1
        self._there: set[tuple[int, int]] = set()

    @contextmanager
    def dividing(self, walk: int, forward: Half, backward: Half) -> Iterator[None]:
        """A context for one pair."""
        first, second = self.cuda.current_stream(self._device), self._second
        if second is None:
            second = self._second = self.cuda.Stream(self._device)
        if walk != self._walk:
            self._walk = walk
            self._there.clear()
        if _cell(backward) in self._there:
            forward.stream, backward.stream, there = first, second, backward
        else:
            self._there.add(_cell(forward))
            forward.stream, backward.stream, there = second, first, forward
        self._after(first, second)
        for tensor in () if there.value is None else tensors_of(there.value):
            tensor.record_stream(second)
        kept = [half.stage.in_action for half in (forward, backward) if isinstance(half.stage, Interruptible)]
        yield
        self._after(second, first)
        del kept

    def _after(self, earlier: Any, later: Any) -> None:
        event = self.cuda.Event(enable_timing=False)
        event.record(earlier)
        later.wait_event(event)


def _kind(half: Half) -> tuple[int, str]:
    return half.action.stage, half.action.letter


def _cell(half: Half) -> tuple[int, int]:
    return half.action.stage, half.action.microbatch
