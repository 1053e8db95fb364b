"""Benchmark suites for tests, as documents."""

from __future__ import annotations

from typing import Any

from support.paths import ROOT
from support.problems import uniform_document

Document = dict[str, Any]

BENCHMARKS = ROOT / "benchmarks"


def entry(name: str = "small", **changes: Any) -> Document:
    """An instance with the optimal span 24; ``changes`` are further keys."""
    return {"name": name, "problem": uniform_document(2, 4, limit=4), **changes}


def suite(*entries: Document) -> Document:
    return {"instances": list(entries)}


def peer(span: float | None, *, fits: bool | None = True, placement: str = "v", **more: bool) -> Document:
    """The result of another planner."""
    return {"placement": placement, "span": span, "makespan": span, "fits": fits, **more}
