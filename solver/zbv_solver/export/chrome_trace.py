"""Trace Event Format: the JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process, one thread per rank, one complete event per action, one memory counter per rank. Times are
microseconds; for other units of a plan, one unit counts as a microsecond.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from numpy.typing import NDArray

from zbv_solver.documents.files import number
from zbv_solver.export.palette import NAMES
from zbv_solver.export.timeline import Timeline, holds_memory, timeline
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import LETTERS, NANOSECONDS

_PROCESS = 0
_BLOCK = 10_000
"""Events that are in memory at a time."""


def render(plan: Plan) -> str:
    """The plan as a Trace Event Format document."""
    line = timeline(plan)
    scale = NANOSECONDS.get(plan.problem.units.time or "us", 1e3) / 1e3  # to microseconds
    features = {f"feature {each.name}": each.value for each in plan.problem.features}
    events = chain(_names(line), _actions(line, scale, features))
    if holds_memory(plan.problem):
        events = chain(events, _memory(plan, line, scale))
    document = {
        "displayTimeUnit": "ms",
        "otherData": {
            "plan_id": plan.plan_id,
            "time_unit": plan.problem.units.time,
            "span": number(plan.metrics.span),
            "makespan": number(plan.metrics.makespan),
        },
    }
    # One event a line: large traces stay readable and diffable, and no copy of the list is indented. An event
    # takes ten times as much memory as its line, so few events are kept at a time.
    head = json.dumps(document, ensure_ascii=False)[1:-1]
    lines = (json.dumps(event, ensure_ascii=False) for event in events)
    body = ",\n".join(iter(lambda: ",\n".join(islice(lines, _BLOCK)), ""))
    return f'{{{head}, "traceEvents": [\n{body}\n]}}\n'


def _names(line: Timeline) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": _PROCESS, "args": {"name": "zbv plan"}}
    for rank in range(line.pp_degree):
        thread = {"ph": "M", "pid": _PROCESS, "tid": rank}
        yield {**thread, "name": "thread_name", "args": {"name": f"rank {rank}"}}
        yield {**thread, "name": "thread_sort_index", "args": {"sort_index": rank}}


def _actions(
    line: Timeline, scale: float, features: Mapping[str, Sequence[float]]
) -> Iterator[dict[str, Any]]:
    columns = (line.rank, line.stage, line.chunk, line.letter, line.microbatch, line.start, line.end)
    for rank, stage, chunk, code, microbatch, start, end in _rows(columns):
        letter = LETTERS[code]
        yield {
            "ph": "X",
            "name": f"{stage}{letter}{microbatch}",
            "cat": NAMES[letter],
            "pid": _PROCESS,
            "tid": rank,
            "ts": start * scale,
            "dur": (end - start) * scale,
            "args": {
                "stage": stage,
                "chunk": chunk,
                "microbatch": microbatch,
                "letter": letter,
                **{name: number(value[microbatch]) for name, value in features.items()},
            },
        }


def _memory(plan: Plan, line: Timeline, scale: float) -> Iterator[dict[str, Any]]:
    columns = (line.rank, line.start, line.end, line.during, line.after)
    for rank, static in enumerate(plan.problem.memory.static):
        yield _counter(rank, 0.0, static)
    for rank, start, end, during, after in _rows(columns):
        yield _counter(rank, start * scale, during)
        if after != during:
            yield _counter(rank, end * scale, after)


def _rows(columns: Sequence[NDArray[Any]]) -> Iterator[tuple[Any, ...]]:
    """The rows of a table, from its columns, as Python numbers."""
    for begin in range(0, len(columns[0]), _BLOCK):
        yield from zip(*(column[begin : begin + _BLOCK].tolist() for column in columns), strict=True)


def _counter(rank: int, at: float, held: float) -> dict[str, Any]:
    # A counter belongs to a process, not a thread: its name has to carry the rank.
    return {"ph": "C", "name": f"memory rank {rank}", "pid": _PROCESS, "ts": at, "args": {"held": held}}
