"""Plans of every family on the model of NCCL: which end with K kernels of NCCL at once on each device.

The real transport and executor run in virtual time; docs/nccl-model.md explains the model. Prints the rows of
the table there. Targets hold for the K that the transport states: every run ends, with right numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO

from support.fake_nccl.families import FAMILIES, PAIRED_FAMILIES, Plan, stated_kernels
from support.fake_nccl.pipeline import FIRST_TIMES, ModelRun, run_plan
from support.fake_nccl.simulation import Deadlock

from benchmarks.findings import Finding, Target
from benchmarks.worker.ranks import Workload


class NcclModelWorkload(Workload):
    """What runs."""

    families: tuple[str, ...] = ()
    """Names of families; all if empty."""
    kernels: tuple[int, ...] = (1, 2, 3, 4)
    """The numbers K of kernels at once that are tried on every family."""
    sizes: tuple[tuple[int, int], ...] = ((4, 8), (8, 12))
    """Microbatches by number of ranks."""
    seeds: int = 2
    """Runs of each plan, with other durations."""
    replicas: int = 1
    experts: bool = False
    """Whether the stages of replicas exchange what they compute."""
    sharded: bool = False
    """Whether the replicas divide the parameters."""
    look_ahead: int = 1
    """Receives posted ahead per channel; runs over NCCL use 1."""


def measure(workload: NcclModelWorkload) -> list[Finding]:
    """Run every family; prints a row of Markdown for each."""
    print("| plans | K stated | " + " | ".join(f"K = {k}" for k in workload.kernels) + " | most unsent |")
    print("| --- " * (len(workload.kernels) + 3) + "|")
    return [_family(name, workload) for name in workload.families or FAMILIES]


def _family(name: str, workload: NcclModelWorkload) -> Finding:
    plans = [{**FAMILIES, **PAIRED_FAMILIES}[name](p, m) for p, m in workload.sizes]
    stated = max(stated_kernels(plan, workload.replicas) for plan in plans) + workload.experts
    ended = dict.fromkeys(sorted({*workload.kernels, stated}), 0)
    unsent = runs = 0
    for plan in plans:
        for seed in range(workload.seeds):
            runs += 1
            for k in ended:
                used = _run(plan, k, seed, workload)
                ended[k] += used is not None
                unsent = max(unsent, used or 0)
    print(f"| {name} | {stated} | {_cells(ended, workload, runs)} | {unsent} |", flush=True)
    what = f"{name}: runs that end with {stated} kernels at once"
    return Finding(what, 100 * ended[stated] / runs, "%", target=Target(100, "at least"))


def _cells(ended: Mapping[int, int], workload: NcclModelWorkload, runs: int) -> str:
    def cell(count: int) -> str:
        return "all end" if count == runs else "all hang" if not count else f"{runs - count} of {runs} hang"

    return " | ".join(cell(ended[k]) for k in workload.kernels)


def _run(plan: Plan, kernels: int, seed: int, workload: NcclModelWorkload) -> int | None:
    """The most unsent tensors of a rank; None if the run hangs."""
    how = ModelRun(
        seed=seed,
        replicas=workload.replicas,
        has_experts=workload.experts,
        is_sharded=workload.sharded,
        look_ahead=workload.look_ahead,
        device=replace(FIRST_TIMES, kernel_slots=kernels),
    )
    try:
        with redirect_stderr(StringIO()):  # the transport writes a line per rank when it connects
            used = run_plan(*plan, how)
    except Deadlock:
        return None
    return max(use.unsent for use in used)
