"""Measured steps in the Trace Event Format, which Perfetto and chrome://tracing open.

One process per replica, one thread per rank, one event per action and one per wait before it; plans are
exported in the same form (:mod:`zbv_solver.export.chrome_trace`), so that the two can be compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from zbv_solver.export.palette import NAMES
from zbv_solver.measure.rank_trace import RankTrace, StepTrace
from zbv_solver.problem.problem import LETTERS

_MICROSECOND = 1e3


def picture(traces: Sequence[RankTrace]) -> str:
    """Traces on one clock as a document; times are microseconds since the first record of any rank."""
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
