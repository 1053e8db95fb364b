"""The ranks' traces on one clock, and as a file for Perfetto and chrome://tracing.

Every rank records by its own clock. Rank 0 collects the records, converts them to its clock and writes them
in the Trace Event Format: one process per plan, one thread per rank, one complete event per action, and one
for the wait before it. Plans are exported in the same form (:mod:`zbv_solver.export.chrome_trace`), so that
planned and measured times can be compared.

The offsets between the clocks are measured by pings. Rank 0 reads its clock, a peer answers with its own,
rank 0 reads its clock again. The peer's answer is assumed to lie in the middle of the round trip; the offset
is wrong by at most half of it. Of several exchanges, the one with the shortest round trip is the most precise
(Cristian, "Probabilistic clock synchronization", 1989).

Clocks of different hosts also run at slightly different speeds. So offsets are measured before and after the
interval of interest and interpolated linearly in between.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter
from zbv_solver.documents.files import output, write
from zbv_solver.export.palette import NAMES
from zbv_solver.plans.orders import Action

from zbv_worker.errors import InvalidRun, naming_errors
from zbv_worker.execution.timeline import StepResult
from zbv_worker.transport.channels import Transport

Clock = Callable[[], int]
"""A rank's clock in nanoseconds: monotonic, with any origin."""

DEFAULT_CLOCK: Clock = time.perf_counter_ns
DEFAULT_EXCHANGES = 20


@dataclass(frozen=True)
class Offset:
    """The offset of a rank's clock from rank 0's, in nanoseconds."""

    at: int = 0
    """The rank's own clock when the offset was measured."""
    ahead: int = 0
    """The rank's clock minus rank 0's."""
    uncertainty: int = 0
    """The largest error of ``ahead``: half of the shortest round trip."""


_OFFSETS = TypeAdapter(tuple[Offset, ...])


@dataclass(frozen=True)
class Alignment:
    """Converts every rank's times to rank 0's clock."""

    before: tuple[Offset, ...]
    after: tuple[Offset, ...]
    """Offsets by rank, measured at two times."""

    def to_rank_0(self, rank: int, times: NDArray[np.int64]) -> NDArray[np.int64]:
        """Convert times of a rank's clock (nanoseconds, any shape) to rank 0's clock."""
        first, last = self.before[rank], self.after[rank]
        elapsed = last.at - first.at
        # Integers until the last step: a float cannot hold nanoseconds since the host's start exactly.
        drift = (last.ahead - first.ahead) / elapsed if elapsed > 0 else 0.0
        moved = np.rint((times - first.at) * drift).astype(np.int64)
        aligned: NDArray[np.int64] = times - first.ahead - moved
        return aligned

    @property
    def uncertainty(self) -> int:
        """The largest error of an aligned time, in nanoseconds."""
        return max(offset.uncertainty for offset in (*self.before, *self.after))


def find_offsets(
    transport: Transport,
    timeout: float,
    clock: Clock = DEFAULT_CLOCK,
    exchanges: int = DEFAULT_EXCHANGES,
) -> tuple[Offset, ...]:
    """Measure every rank's offset; returns them by rank, identical on all ranks. Collective.

    Parameters
    ----------
    timeout
        Seconds to wait for any one message.

    Raises
    ------
    TimeoutError, ConnectionError
        If a rank does not take part.
    """
    transport.barrier(timeout)  # without it, a busy peer's answer would be late
    found = None
    if transport.rank == 0:
        peers = range(1, transport.world_size)
        found = (Offset(at=clock()), *(_ask(transport, peer, timeout, clock, exchanges) for peer in peers))
    else:
        for _ in range(exchanges):
            transport.hear(0, timeout)
            transport.tell(0, clock(), timeout)
    said = None if found is None else _OFFSETS.dump_python(found, mode="json")
    return _OFFSETS.validate_python(transport.gather(said, timeout)[0])


def _ask(transport: Transport, peer: int, timeout: float, clock: Clock, exchanges: int) -> Offset:
    """Measure the offset of one peer, from the shortest of several exchanges."""
    answers: list[tuple[int, Offset]] = []
    for _ in range(exchanges):
        asked = clock()
        transport.tell(peer, asked, timeout)
        answer = transport.hear(peer, timeout)
        round_trip = clock() - asked
        ahead = answer - asked - round_trip // 2
        answers.append((round_trip, Offset(at=answer, ahead=ahead, uncertainty=-(-round_trip // 2))))
    return min(answers, key=itemgetter(0))[1]


WAIT, START, END = range(3)
"""Columns of :attr:`RankTrace.times`."""

_MICROSECOND = 1e3


@dataclass(frozen=True, eq=False)
class RankTrace:
    """When each of a rank's n actions happened, in every step."""

    plan_id: str
    rank: int
    actions: tuple[Action, ...]
    """In execution order; the same in every step."""
    times: NDArray[np.int64]
    """(steps, n, 3) int64, nanoseconds: when the rank turned to the action, when its input was available,
    when it was complete."""
    received: NDArray[np.int64]
    """(steps, n) int64: bytes of inputs from other ranks."""

    @classmethod
    def of(cls, plan_id: str, rank: int, steps: Sequence[StepResult]) -> RankTrace:
        """The trace of one or more steps."""
        records = [result.records for result in steps]
        return cls(
            plan_id=plan_id,
            rank=rank,
            actions=tuple(record.action for record in records[0]),
            times=np.array([[(r.wait, r.start, r.end) for r in step] for step in records], dtype=np.int64),
            received=np.array([[r.received for r in step] for step in records], dtype=np.int64),
        )

    def divided(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(steps,) nanoseconds in actions, and from an action's end until the rank turns to the next.

        Time in both actions of a pair counts once.
        """
        order = np.argsort(self.times[:, :, START], axis=1, kind="stable")
        times = np.take_along_axis(self.times, order[..., None], axis=1)
        ends = np.maximum.accumulate(times[:, :, END], axis=1)
        idle = np.maximum(0, times[:, 1:, START] - ends[:, :-1]).sum(axis=1)
        turned = np.minimum.accumulate(times[:, ::-1, WAIT], axis=1)[:, ::-1]
        between = np.maximum(0, turned[:, 1:] - ends[:, :-1]).sum(axis=1)
        return ends[:, -1] - times[:, 0, START] - idle, between

    def document(self) -> dict[str, Any]:
        """The trace as JSON."""
        arrays = {"times": self.times.tolist(), "received": self.received.tolist()}
        return {"plan_id": self.plan_id, "rank": self.rank, "actions": self.actions, **arrays}

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> RankTrace:
        """Read a document of :meth:`document`."""
        return cls(
            plan_id=str(document["plan_id"]),
            rank=int(document["rank"]),
            actions=tuple(Action(*action) for action in document["actions"]),
            times=np.array(document["times"], dtype=np.int64),
            received=np.array(document["received"], dtype=np.int64),
        )


class SharedTrace:
    """Collects the ranks' traces of a run that starts when this is created. Collective, like :meth:`write`.

    Parameters
    ----------
    timeout
        Seconds to wait for the other ranks.
    """

    def __init__(self, transport: Transport, timeout: float):
        self._transport = transport
        self._timeout = timeout
        self._before = self._offsets()

    def write(self, path: Path, mine: Sequence[RankTrace]) -> None:
        """Write the traces of all ranks, one per rank and plan; only rank 0 writes. See :func:`claim`."""
        alignment = Alignment(self._before, self._offsets())
        with naming_errors(self._transport.rank, "collecting the traces"):
            plans = [collect(self._transport, trace, alignment, self._timeout) for trace in mine]
        if self._transport.rank == 0:
            write(path, render(plans, alignment))

    def _offsets(self) -> tuple[Offset, ...]:
        with naming_errors(self._transport.rank, "comparing clocks"):
            return find_offsets(self._transport, self._timeout)


def collect(
    transport: Transport, mine: RankTrace, alignment: Alignment, timeout: float
) -> tuple[RankTrace, ...]:
    """Return every rank's trace on rank 0's clock, by rank. Collective.

    Raises
    ------
    TimeoutError
        If a rank does not take part.
    """
    gathered = map(RankTrace.parse, transport.gather(mine.document(), timeout))
    return tuple(
        replace(trace, times=alignment.to_rank_0(rank, trace.times)) for rank, trace in enumerate(gathered)
    )


def claim(path: Path, what: str = "--trace") -> None:
    """Create the trace's folder, and raise :class:`InvalidRun` if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with output(path):
            pass
    except OSError as error:
        raise InvalidRun(f"{what} {path}: {error.strerror}. Give a file that can be written.") from error


def render(plans: Sequence[Sequence[RankTrace]], alignment: Alignment) -> str:
    """Format the traces of one or more plans, each by rank, as a Trace Event Format document.

    Times are microseconds since the first record of all plans.
    """
    origin = min(int(trace.times.min()) for traces in plans for trace in traces)
    events = [
        event
        for process, traces in enumerate(plans)
        for event in (*_names(process, traces), *_events(process, traces, origin))
    ]
    document = {
        "displayTimeUnit": "ms",
        "otherData": {
            "plan_ids": [traces[0].plan_id for traces in plans],
            "clocks_ahead_us": [offset.ahead / _MICROSECOND for offset in alignment.before],
            "clock_uncertainty_us": alignment.uncertainty / _MICROSECOND,
        },
    }
    head = json.dumps(document)[1:-1]
    body = ",\n".join(map(json.dumps, events))
    return f'{{{head}, "traceEvents": [\n{body}\n]}}\n'


def _names(process: int, traces: Sequence[RankTrace]) -> Iterator[dict[str, Any]]:
    name = f"measured, plan {traces[0].plan_id[:12]}"
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    rows = [(trace.rank, f"rank {trace.rank}", 2 * trace.rank) for trace in traces]
    for trace in traces:
        if _overlaps(trace).any():
            row = _second_row(trace, traces)
            rows.append((row, f"rank {trace.rank}, backwards of pairs", 2 * trace.rank + 1))
    for row, text, place in rows:
        thread = {"ph": "M", "pid": process, "tid": row}
        yield {**thread, "name": "thread_name", "args": {"name": text}}
        yield {**thread, "name": "thread_sort_index", "args": {"sort_index": place}}


def _second_row(trace: RankTrace, traces: Sequence[RankTrace]) -> int:
    """The row of what runs together with the action before it: viewers draw a row's events one in another."""
    return 1 + max(each.rank for each in traces) + trace.rank


def _overlaps(trace: RankTrace) -> NDArray[np.bool_]:
    """(steps, n) whether an action started before the one before it had ended: the backward of a pair."""
    found = np.zeros(trace.times.shape[:2], dtype=np.bool_)
    found[:, 1:] = trace.times[:, 1:, START] < trace.times[:, :-1, END]
    return found


def _events(process: int, traces: Sequence[RankTrace], origin: int) -> Iterator[dict[str, Any]]:
    for trace in traces:
        second, overlaps = _second_row(trace, traces), _overlaps(trace).tolist()
        microseconds = ((trace.times - origin) / _MICROSECOND).tolist()
        for step, (rows, sizes) in enumerate(zip(microseconds, trace.received.tolist(), strict=True)):
            columns = zip(trace.actions, rows, sizes, overlaps[step], strict=True)
            for action, (wait, start, end), size, is_second in columns:
                event = {"ph": "X", "pid": process, "tid": second if is_second else trace.rank}
                if start > wait and not is_second:
                    yield {
                        **event,
                        "name": f"wait for the input of {action}",
                        "cat": "waiting",
                        "ts": wait,
                        "dur": start - wait,
                        "args": {"step": step},
                    }
                yield {
                    **event,
                    "name": str(action),
                    "cat": NAMES[action.letter],
                    "ts": start,
                    "dur": end - start,
                    "args": {
                        "stage": action.stage,
                        "microbatch": action.microbatch,
                        "letter": action.letter,
                        "step": step,
                        "wait": start - wait,
                        "received_bytes": size,
                    },
                }
