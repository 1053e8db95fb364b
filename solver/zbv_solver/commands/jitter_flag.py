"""The flag ``--jitter`` of commands, and traces of ranks. It loads no kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zbv_solver.documents.files import file_label, read_json
from zbv_solver.errors import InvalidInput
from zbv_solver.measure.rank_trace import RankTrace, parse_rank_trace
from zbv_solver.measure.refit import jitter_of_traces
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.jitter import SHORT_FORM, Jitter, parse_jitter


def read_jitter(text: str, plan: Plan | None = None) -> Jitter:
    """The jitter of a flag: its short form, a file with its document, or traces of ranks that ran the plan.

    Raises
    ------
    InvalidInput
        When it is none of them, or there are traces and no plan.
    OSError
        When a file cannot be read.
    """
    paths = text.split(",")
    if not all(path.endswith(".json") for path in paths):
        try:
            return parse_jitter(text)
        except InvalidInput as error:
            other = "a jitter document" if plan is None else "a jitter document or traces"
            hint = f"{error.issues[0].detail} A .json file with {other} is also accepted."
            raise InvalidInput.at("", hint).found_in("--jitter") from None
    documents = {path: read_json(Path(path)) for path in paths}
    traces: list[RankTrace] = []
    for path, document in documents.items():
        try:
            is_trace = isinstance(document, dict) and "steps" in document
            if not is_trace and len(paths) == 1:
                return parse_jitter(document)
            traces.append(_trace_of(plan, document))
        except InvalidInput as error:
            raise error.found_in(file_label(path)) from None
    if plan is None:  # _trace_of has refused every trace
        raise InvalidInput.at("", f"found no file; jitter is written as {SHORT_FORM}.")
    return jitter_of_traces(plan.problem, traces, plan.orders)


def _trace_of(plan: Plan | None, document: Any) -> RankTrace:
    if plan is None:
        raise InvalidInput.at(
            "",
            "this is a trace, which needs the plan that it belongs to. Run `zbv simulate PLAN --jitter "
            "TRACES --json`, and store its key `jitter` in a file.",
        )
    return trace_of(plan.plan_id, document)


def trace_of(plan_id: str, document: Any) -> RankTrace:
    """The trace of a rank that ran this plan; raises :class:`InvalidInput` when it ran another one."""
    trace = parse_rank_trace(document)
    if trace.plan_id != plan_id:
        raise InvalidInput.at("/plan_id", f"found {trace.plan_id[:12]}; the plan given is {plan_id[:12]}.")
    return trace
