"""Traces and logs of ranks: taken from agents, stored, and read again.

The newest steps of each rank's traces are kept, because ranks write them at different times and a reader
needs steps that all ranks have. The merged trace shows the newest such step on rank 0's clock.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from zbv_solver.errors import InvalidInput
from zbv_solver.measure.rank_trace import RankTrace, parse_rank_trace

from zbv_service.compute.computations import Computations
from zbv_service.database import PartTable
from zbv_service.documents.packing import pack, unpack
from zbv_service.documents.parsing import decompressed, parse_body
from zbv_service.errors import MALFORMED_JSON, NOT_FOUND, ProblemError
from zbv_service.records.runs import NewPart, PartInfo, PartKind, RunRecord
from zbv_service.runs.agent_documents import RankEvents
from zbv_service.runs.picture import picture

MAX_LOG_BYTES = 256 * 1024
"""Bytes kept of the end of a rank's log, which explains failures."""

KEPT_STEPS = 15
_KEPT_ACTIONS = 60_000
"""Most records kept per rank, unless a single step has more."""


@dataclass(frozen=True)
class ReadTrace:
    """A checked trace: the part to store and its metadata."""

    packed: bytes
    plan_id: str
    pp_rank: int
    replica: int
    last_step: int | None


def read_trace(rank: int, former: bytes | None, gzip_limit: int | None, body: bytes | bytearray) -> ReadTrace:
    """Check a rank's trace, and merge it with the stored one.

    Parameters
    ----------
    gzip_limit
        Most bytes of a gzip body after decompression; None for a plain body.

    Raises
    ------
    ProblemError, InvalidInput
        It is not a trace, or belongs to another rank.
    """
    document = _parse_json(body if gzip_limit is None else decompressed(body, gzip_limit))
    trace = parse_rank_trace(document)
    if trace.rank != rank:
        raise InvalidInput.at("/rank", f"found {trace.rank}; the address says {rank}.")
    last = trace.steps[-1].step if trace.steps else None
    return ReadTrace(_joined(document, former), trace.plan_id, trace.pp_rank, trace.replica, last)


def read_events(document: Any) -> RankEvents:
    """The events in a decoded document of a rank; raises :class:`InvalidInput`."""
    return parse_body(RankEvents, document)


def parse_traces(packed: Sequence[bytes]) -> tuple[RankTrace, ...]:
    """Packed traces."""
    return tuple(parse_rank_trace(unpack(each)) for each in packed)


def merged(generation: int, packed: Sequence[bytes]) -> bytes:
    """The newest step that the packed traces of all ranks have in common, in the Trace Event Format.

    Raises
    ------
    ProblemError
        404 where there is none.
    """
    traces = parse_traces(packed)
    common = frozenset.intersection(*(trace.numbers for trace in traces))
    if not common or len({trace.plan_id for trace in traces}) > 1:
        raise ProblemError(
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

    async def require_owner(self, agent_id: str, run_id: str, generation: int, rank: int) -> None:
        """Raise :class:`ProblemError` 404 unless the agent had this rank."""
        ranks = await self._table.ranks_of(agent_id, run_id, generation)
        if ranks is None or rank not in ranks:
            raise ProblemError(
                NOT_FOUND, f"agent {agent_id} has no rank {rank} in generation {generation} of run {run_id}."
            )

    async def put_trace(
        self, run_id: str, generation: int, rank: int, body: bytes | bytearray, is_gzip: bool, limit: int
    ) -> None:
        """Store a rank's trace together with the newest steps of its earlier ones.

        Parameters
        ----------
        body, is_gzip, limit
            JSON text, possibly as gzip, of at most ``limit`` bytes.

        Raises
        ------
        ProblemError, InvalidInput
            It is not a trace, or belongs to another rank.
        """
        former = await self._table.read(run_id, generation, "trace", [rank])
        read = partial(read_trace, rank, former[0].body if former else None, limit if is_gzip else None)
        read_one = await self._computations.for_client(read, body)
        await self._table.put(
            NewPart(
                run_id=run_id,
                generation=generation,
                rank=rank,
                kind="trace",
                body=read_one.packed,
                plan_id=read_one.plan_id,
                pp_rank=read_one.pp_rank,
                replica=read_one.replica,
                last_step=read_one.last_step,
            )
        )

    async def put_log(self, run_id: str, generation: int, rank: int, text: bytes) -> None:
        """Store the end of a rank's log."""
        packed = await asyncio.to_thread(zlib.compress, text)
        await self._table.put(NewPart(run_id, generation, rank, "log", packed))

    async def put_events(self, run_id: str, generation: int, rank: int, text: bytes) -> None:
        """Store events of a rank; repeated events are ignored.

        Raises
        ------
        ProblemError, InvalidInput
            The text is not a document of events, or belongs to another rank.
        """
        told = await self._computations.of_body(read_events, text)
        if told.rank != rank:
            raise InvalidInput.at("/rank", f"found {told.rank}; the address says {rank}.")
        details = [
            f"generation {generation}, rank {rank}, step {event.step}: the {event.what} is {event.value}"
            for event in told.events
        ]
        await self._table.note(run_id, "non_finite", details)

    async def traces(
        self, run_id: str, generation: int, ranks: Sequence[int] | None = None
    ) -> tuple[RankTrace, ...]:
        """The traces of these ranks, or of all ranks, by rank."""
        parts = await self._table.read(run_id, generation, "trace", ranks)
        return await self._computations.run(parse_traces, [part.body for part in parts])

    async def index(self, run_id: str) -> list[PartInfo]:
        """The list of a run's parts in all generations, without their content."""
        return await self._table.index(run_id)

    async def packed_traces(self, run_id: str, generation: int, ranks: Sequence[int]) -> dict[int, bytes]:
        """The packed traces of these ranks, by rank."""
        parts = await self._table.read(run_id, generation, "trace", ranks)
        return {part.rank: part.body for part in parts}

    async def merged_trace(self, run: RunRecord, generation: int | None) -> bytes:
        """All ranks' newest common step as one Trace Event Format document.

        Raises
        ------
        ProblemError
            404: a rank has sent no trace yet, or the ranks have no step of one plan in common.
        """
        chosen = await self._generation(run.id, "trace", generation)
        parts = await self._table.read(run.id, chosen, "trace", None)
        missing = set(range(run.nodes * run.ranks_per_node)) - {part.rank for part in parts}
        if missing:
            named = ", ".join(map(str, sorted(missing)[:8])) + (", …" if len(missing) > 8 else "")
            raise ProblemError(
                NOT_FOUND,
                f"ranks {named} of generation {chosen} have sent no trace yet. Try again soon.",
            )
        return await self._computations.run(partial(merged, chosen), [part.body for part in parts])

    async def log(self, run_id: str, rank: int, generation: int | None) -> str:
        """The end of a rank's log; raises :class:`ProblemError` 404."""
        chosen = await self._generation(run_id, "log", generation, rank)
        for part in await self._table.read(run_id, chosen, "log", [rank]):
            return zlib.decompress(part.body).decode(errors="replace")
        raise ProblemError(NOT_FOUND, f"found no log of rank {rank} in generation {chosen} of run {run_id}.")

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
            raise ProblemError(NOT_FOUND, f"run {run_id} has no {kind} of {whose}; agents send it {when}.")
        return newest


def _joined(document: dict[str, Any], former: bytes | None) -> bytes:
    """A trace with the steps of an earlier one, packed; steps of another plan or clock are dropped."""
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
    return pack({**document, "steps": kept[::-1]})


def _parse_json(text: bytes | bytearray) -> Any:
    """Decode JSON with NaN or infinite losses, which become null."""
    try:
        return json.loads(text.decode(), parse_constant=lambda _name: None)
    except (ValueError, RecursionError) as error:
        raise ProblemError(MALFORMED_JSON, f"The body is not JSON: {error}.") from None
