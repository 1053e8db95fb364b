"""What PyTorch's allocator reserves over what tensors need, and how near that brings torchtitan's own table.

The share is the median of published sources that print both peaks; a source with several runs counts once,
with their mean. No run of Llama 3.1 405B is among them, so its rows test the account and the share together.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from statistics import mean, median
from typing import Any

from zbv_models.fixed_orders.schedules import torch_schedule
from zbv_models.layouts.cluster import ALLOCATOR_SHARE, equal_cluster
from zbv_models.layouts.estimated_layout import EstimatedLayout
from zbv_models.layouts.executor_memory import in_order
from zbv_models.layouts.layout import Layout
from zbv_models.layouts.request import parse_request
from zbv_solver.problem.cut import Cut
from zbv_solver.timing.start_times import evaluate

from benchmarks.findings import Finding, at_most

RUNS = Path(__file__).parent / "reserved.json"
GIB = 2**30
STAGE_RANKS = 8
"""Pipeline ranks of the runs of 405B; they have as many microbatches."""
MOST_ERROR = 10.0
"""Percent, of the two schedules of 405B."""
TARGETS = ("405B, 1F1B", "405B, Interleaved1F1B")


def findings() -> list[Finding]:
    """The share of every source, their median, and the errors for torchtitan's table."""
    document = json.loads(RUNS.read_text(encoding="utf-8"))
    shares: dict[str, list[float]] = defaultdict(list)
    found = []
    for run in document["printed"]:
        share = run["reserved"] / run["tensors"]
        shares[run["source"]].append(share)
        found.append(Finding(f"printed: {run['run']}", share))
    share = round(median(map(mean, shares.values())), 2)
    found.append(Finding(f"median of {len(shares)} sources", share))
    found.append(Finding("allocator_share of zbv layout", ALLOCATOR_SHARE))
    return [*found, *_table(document["torchtitan"]["runs"])]


def _table(runs: Iterable[dict[str, Any]]) -> Iterable[Finding]:
    for run in runs:
        tensors = tensors_of(run)
        error = 100 * (ALLOCATOR_SHARE * tensors / (run["reserved_gib"] * GIB) - 1)
        held = f"{tensors / GIB:.1f} GiB of tensors, {run['reserved_gib']} reserved"
        name = f"torchtitan, {run['run']}: {held}; error"
        yield Finding(name, error, "%")
        if run["run"] in TARGETS:
            yield Finding("  its size", abs(error), "%", at_most(MOST_ERROR))


def tensors_of(run: dict[str, Any]) -> float:
    """Bytes of the tensors on the fullest device of a run of torchtitan, by its account."""
    tensor, context, data = run.get("tensor", 1), run.get("context", 1), run["data"]
    stages = run.get("blocks", [])
    ranks, size = (STAGE_RANKS if stages else 1), run.get("microbatch", 1)
    microbatches = ranks
    request = parse_request(
        {
            "presets": [run["preset"]],
            # Only the pipeline's rows say that FSDP gathers in float8; without one, nothing stays gathered.
            "model": {"product_dtype": "fp8"} if stages else {},
            "global_batch": size * microbatches * data,
            "sequence_length": run.get("sequence", 8192),
        },
        equal_cluster(
            {"nodes": max(1, tensor * context * data * ranks // 8), "gpus_per_node": 8, "device": "h100"}
        ),
        parallel={"precision": "float8-gather"} if stages else None,
        executor="torchtitan",
    )
    recompute = run.get("recompute", "full")
    layout = Layout(
        *(tensor, context, 1, data, ranks, size, microbatches, 1 if stages else 3, recompute, "tp-cp-dp-pp"),
        recompute_modules=("op",) if recompute == "selective" else (),
    )
    estimated = EstimatedLayout.of(layout, request.setting.of_executor("torchtitan"))
    chunks = max(1, len(stages) // ranks)
    problem = replace(estimated.with_buffers("torchtitan", chunks), limit=None)
    schedule = torch_schedule("Interleaved1F1B" if chunks > 1 else "1F1B", ranks, microbatches, chunks)
    bounds = (0, *(1 + done for done in accumulate(stages[:-1])), problem.model.n_layers)
    cut, orders = problem.cut_into(schedule.placement, Cut.at(bounds)), schedule.orders()
    return max(evaluate(in_order(cut, orders, estimated.passing), orders).peak_memory)
