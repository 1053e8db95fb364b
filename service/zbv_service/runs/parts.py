"""Checks, stores and reads the traces and logs of ranks.

The newest steps of each rank's traces are kept, because ranks write them at different times and a reader
needs steps that all ranks have. The merged trace shows the newest such step on rank 0's clock.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from zbv_solver.errors import InvalidInput
from zbv_solver.export.palette import NAMES
from zbv_solver.measure.rank_trace import RankTrace, StepTrace, parse_rank_trace
from zbv_solver.problem.problem import LETTERS

from zbv_service.compute.computations import Computations
from zbv_service.database import PartTable
from zbv_service.documents.parsing import decompressed, parse_body
from zbv_service.documents.problems import pack, unpack
from zbv_service.errors import MALFORMED_JSON, NOT_FOUND, ApiError
from zbv_service.records.agents import NonFinite, RankEvents
from zbv_service.records.runs import NewPart, PartInfo, PartKind, RunDocument

MAX_LOG_BYTES = 256 * 1024
"""Bytes kept of the end of a rank's log, which explains failures."""

KEPT_STEPS = 15
_KEPT_ACTIONS = 60_000
"""Most records kept per rank, unless a single step has more."""


@dataclass(frozen=True)
class RankKey:
    """One rank in one generation of a run."""

    run_id: str
    generation: int
    rank: int


def read_trace(
    key: RankKey, former: bytes | None, gzip_limit: int | None, body: bytes | bytearray
) -> NewPart:
    """Check a rank's trace, and merge it with the stored one.

    Parameters
    ----------
    former
        The packed trace that is stored.
    gzip_limit
        Most bytes of a gzip body after decompression; None for a plain body.

    Raises
    ------
    ApiError, InvalidInput
        It is not a trace, or belongs to another rank.
    """
    document = _parse_json(body if gzip_limit is None else decompressed(body, gzip_limit))
    trace = parse_rank_trace(document)
    _require_rank(trace.rank, key)
    return NewPart(
        **asdict(key),
        kind="trace",
        body=_joined(document, former),
        plan_id=trace.plan_id,
        pp_rank=trace.pp_rank,
        replica=trace.replica,
        last_step=trace.steps[-1].step if trace.steps else None,
    )


def _require_rank(found: int, key: RankKey) -> None:
    if found != key.rank:
        raise InvalidInput.at("/rank", f"found {found}; the address says {key.rank}.")


def parse_traces(packed: Sequence[bytes]) -> tuple[RankTrace, ...]:
    """Parse packed traces."""
    return tuple(parse_rank_trace(unpack(each)) for each in packed)


def merged(generation: int, packed: Sequence[bytes]) -> bytes:
    """The newest step that the packed traces of all ranks have in common, in the Trace Event Format.

    Raises
    ------
    ApiError
        404: there is none.
    """
    traces = parse_traces(packed)
    common = frozenset.intersection(*(trace.numbers for trace in traces))
    if not common or len({trace.plan_id for trace in traces}) > 1:
        raise ApiError(
            NOT_FOUND,
            f"the ranks of generation {generation} have no step in common yet. Try again in some seconds.",
        )
    newest = frozenset({max(common)})
    return picture([trace.only(newest) for trace in traces]).encode()


class RunParts:
    """The traces and logs of a service's runs."""

    def __init__(self, table: PartTable, computations: Computations):
        self._table = table
        self._computations = computations

    async def require_owner(self, agent_id: str, key: RankKey) -> None:
        """Raise :class:`ApiError` 404 unless the agent runs or ran this rank."""
        ranks = await self._table.ranks_of(agent_id, key.run_id, key.generation)
        if ranks is None or key.rank not in ranks:
            raise ApiError(
                NOT_FOUND,
                f"agent {agent_id} has no rank {key.rank} in generation {key.generation} of run "
                f"{key.run_id}.",
            )

    async def put_trace(self, key: RankKey, body: bytes | bytearray, gzip_limit: int | None) -> None:
        """Store a rank's trace together with the newest steps of its earlier ones.

        Parameters
        ----------
        body, gzip_limit
            JSON text; if it is gzip, the most bytes after decompression.

        Raises
        ------
        ApiError, InvalidInput
            It is not a trace, or belongs to another rank.
        """
        former = await self._table.read(key.run_id, key.generation, "trace", [key.rank])
        read = partial(read_trace, key, former[0].body if former else None, gzip_limit)
        await self._table.put(await self._computations.run(read, body))

    async def put_log(self, key: RankKey, text: bytes) -> None:
        """Store the end of a rank's log."""
        packed = await asyncio.to_thread(zlib.compress, text)
        await self._table.put(NewPart(**asdict(key), kind="log", body=packed))

    async def put_events(self, key: RankKey, text: bytes) -> None:
        """Store events of a rank; repeated events are ignored.

        Raises
        ------
        ApiError, InvalidInput
            The text is not a document of events, or belongs to another rank.
        """
        document = await self._computations.of_body(partial(parse_body, RankEvents), text)
        _require_rank(document.rank, key)
        place = f"generation {key.generation}, rank {key.rank}"
        details: dict[str, list[str]] = {}
        for each in document.events:
            if isinstance(each, NonFinite):
                said = f"the {each.what} is {each.value}"
            else:
                said = f"the checkpoint is skipped: {each.reason}"
            details.setdefault(each.kind, []).append(f"{place}, step {each.step}: {said}")
        for kind, some in details.items():
            await self._table.note(key.run_id, kind, some)

    async def index(self, run_id: str) -> list[PartInfo]:
        """The list of a run's parts in all generations, without their content."""
        return await self._table.index(run_id)

    async def merged_trace(self, run: RunDocument, generation: int | None) -> bytes:
        """All ranks' newest common step as one Trace Event Format document.

        Raises
        ------
        ApiError
            404: a rank has sent no trace yet, or the ranks have no step of one plan in common.
        """
        chosen = await self._generation(run.id, "trace", generation)
        parts = await self._table.read(run.id, chosen, "trace", None)
        missing = set(range(run.nodes * run.ranks_per_node)) - {part.rank for part in parts}
        if missing:
            named = ", ".join(map(str, sorted(missing)[:8])) + (", …" if len(missing) > 8 else "")
            raise ApiError(
                NOT_FOUND,
                f"ranks {named} of generation {chosen} have sent no trace yet. Try again soon.",
            )
        return await self._computations.run(partial(merged, chosen), [part.body for part in parts])

    async def log(self, run_id: str, rank: int, generation: int | None) -> str:
        """The end of a rank's log; raises :class:`ApiError` 404."""
        chosen = await self._generation(run_id, "log", generation, rank)
        for part in await self._table.read(run_id, chosen, "log", [rank]):
            return (await asyncio.to_thread(zlib.decompress, part.body)).decode(errors="replace")
        raise ApiError(NOT_FOUND, f"found no log of rank {rank} in generation {chosen} of run {run_id}.")

    async def _generation(
        self, run_id: str, kind: PartKind, wanted: int | None, rank: int | None = None
    ) -> int:
        """The requested generation, or the newest one with such a part."""
        if wanted is not None:
            return wanted
        newest = await self._table.newest_generation(run_id, kind, rank)
        if newest is None:
            whose = "its ranks" if rank is None else f"rank {rank}"
            when = "a few seconds after the first step" if kind == "trace" else "when a generation ends"
            raise ApiError(NOT_FOUND, f"run {run_id} has no {kind} of {whose}; agents send it {when}.")
        return newest


def _joined(document: dict[str, Any], former: bytes | None) -> bytes:
    """A packed trace with the steps of an earlier one, without steps of another plan or clock."""
    known = {} if former is None else unpack(former)
    steps = {entry["step"]: entry for entry in document["steps"]}
    if all(known.get(name) == document.get(name) for name in ("plan_id", "clock_offset_ns")):
        steps = {entry["step"]: entry for entry in known["steps"]} | steps
    kept: list[Any] = []
    count = 0
    for step in sorted(steps, reverse=True)[:KEPT_STEPS]:
        count += len(steps[step]["actions"])
        if kept and count > _KEPT_ACTIONS:
            break
        kept.append(steps[step])
    try:
        return pack({**document, "steps": kept[::-1]})
    except ValueError:
        raise ApiError(
            MALFORMED_JSON,
            "The body has a number beyond the range of floats, such as 1e999. Send finite numbers.",
        ) from None


def _parse_json(text: bytes | bytearray) -> Any:
    """Decode JSON with NaN or infinite losses, which become null."""
    try:
        return json.loads(text.decode(), parse_constant=lambda _name: None)
    except (ValueError, RecursionError) as error:
        raise ApiError(MALFORMED_JSON, f"The body is not JSON: {error}.") from None


_MICROSECOND = 1e3


def picture(traces: Sequence[RankTrace]) -> str:
    """Traces on one clock in the Trace Event Format, which Perfetto and chrome://tracing open.

    One process per replica, one thread per rank, one event per action and one per wait before it; plans are
    exported in the same form (:mod:`zbv_solver.export.chrome_trace`), so that the two can be compared. Times
    are microseconds since the first record of any rank.
    """
    steps = [(trace, step) for trace in traces for step in trace.steps]
    origin = min((int(step.times.min()) for _, step in steps if step.times.size), default=0)
    events = [event for trace in traces for event in _names(trace)]
    events += [event for trace, step in steps for event in _events(trace, step, origin)]
    losses = [step.loss for _, step in steps if step.loss is not None]
    document = {
        "displayTimeUnit": "ms",
        "otherData": {
            "plan_id": traces[0].plan_id if traces else None,
            "steps": sorted({step.step for _, step in steps}),
            "losses": losses,
            "clock_uncertainty_us": max((trace.uncertainty for trace in traces), default=0) / _MICROSECOND,
        },
    }
    head = json.dumps(document)[1:-1]
    body = ",\n".join(map(json.dumps, events))
    return f'{{{head}, "traceEvents": [\n{body}\n]}}\n'


def _names(trace: RankTrace) -> Iterator[dict[str, Any]]:
    thread = {"ph": "M", "pid": trace.replica, "tid": trace.pp_rank}
    if trace.pp_rank == 0:
        name = f"replica {trace.replica}, measured, plan {trace.plan_id[:12]}"
        yield {"ph": "M", "name": "process_name", "pid": trace.replica, "args": {"name": name}}
    yield {**thread, "name": "thread_name", "args": {"name": f"rank {trace.rank}"}}
    yield {**thread, "name": "thread_sort_index", "args": {"sort_index": trace.pp_rank}}


def _events(trace: RankTrace, step: StepTrace, origin: int) -> Iterator[dict[str, Any]]:
    orders, microseconds = step.orders, ((step.times - origin) / _MICROSECOND).tolist()
    columns = (orders.text(0), orders.stage, orders.letter, orders.microbatch, microseconds, step.received)
    for text, stage, code, microbatch, (wait, start, end), size in zip(*columns, strict=True):
        event = {"ph": "X", "pid": trace.replica, "tid": trace.pp_rank}
        if start > wait:
            waiting = {"name": f"wait for the input of {text}", "cat": "waiting", "ts": wait}
            yield {**event, **waiting, "dur": start - wait, "args": {"step": step.step}}
        letter = LETTERS[code]
        about = {"stage": int(stage), "microbatch": int(microbatch), "letter": letter, "step": step.step}
        yield {
            **event,
            "name": text,
            "cat": NAMES[letter],
            "ts": start,
            "dur": end - start,
            "args": {**about, "received_bytes": int(size)},
        }
