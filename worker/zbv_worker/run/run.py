"""One rank's run: get the plan, meet the peers, train.

This is what ``zbv-worker run`` does in each process that torchrun starts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from zbv_worker.errors import InvalidRun, naming_errors
from zbv_worker.execution.rank_plan import RankPlan, require_layers
from zbv_worker.failures.failures import Failures, OwnProcess
from zbv_worker.failures.liveness import Liveness
from zbv_worker.failures.progress import CurrentProgress
from zbv_worker.host.process import GarbageCollection, keep_freed_memory, say, threads_per_rank, usable_cores
from zbv_worker.model.protocol import PipelineModel, Weighted
from zbv_worker.run.loop import Loop
from zbv_worker.run.options import RunOptions
from zbv_worker.run.reporting import warn_of_another_program
from zbv_worker.tracing.merged_trace import RankTrace, SharedTrace, claim
from zbv_worker.tracing.report import RankReport
from zbv_worker.transport.channels import Transport
from zbv_worker.transport.connect import open_transport
from zbv_worker.transport.connected import ConnectedTransport
from zbv_worker.transport.gloo_control import GlooControl
from zbv_worker.transport.rendezvous import refuse
from zbv_worker.transport.world import Layout, World, select_device


def run(
    options: RunOptions,
    world: World,
    process: OwnProcess | None = None,
    *,
    progress: CurrentProgress | None = None,
    liveness: Liveness | None = None,
) -> list[RankReport]:
    """Run as one rank of the world; returns one report per plan.

    Parameters
    ----------
    process
        How this process ends if a rank fails once the ranks have met, if it is the worker's own.
    progress
        Updated with the rank's progress during the run.
    liveness
        The rank's thread, if it has one already.

    Raises
    ------
    WorkerError
        See :mod:`zbv_worker.errors`.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    # Find this rank's own errors before meeting the others.
    try:
        layout = Layout.of_world(world.world_size, options.training.replicas)
        device, plans, model = _prepare(options, world, layout.pp_rank(world.rank))
    except Exception as error:
        refuse(world.rank, world.world_size, str(error))
        raise
    with naming_errors(world.rank, "meeting the other ranks"):
        control = GlooControl(world, options.startup_patience, layout)
    failures = Failures(
        control,
        options.timeout,
        options.startup_patience,
        progress=progress,
        process=process,
        liveness=liveness,
    )
    failures.watch()
    sums = options.training.needs_sums_over_ranks or isinstance(model, Weighted)
    with failures.watched("connecting to the other ranks"):
        transport = open_transport(
            control, options.backend, device, options.startup_patience, sums_over_ranks=sums
        )
        failures.connected(transport)
        if options.threads is None and device.type == "cpu":
            _share_cores(transport)
    reports = train(options, plans, model, transport, device, failures)
    with failures.watched("ending the run"):
        transport.flush(options.timeout)
        failures.stop_watching()
        transport.barrier(options.timeout)  # no rank closes while a peer still receives
        _write(reports, options)  # first, because NCCL may hang while its groups are destroyed
    failures.close_transport()
    return reports


def _write(reports: Sequence[RankReport], options: RunOptions) -> None:
    if options.result_dir is not None:
        for report in reports:
            report.write(options.result_dir / report.plan_id if len(reports) > 1 else options.result_dir)


def _prepare(
    options: RunOptions, world: World, pp_rank: int
) -> tuple[torch.device, list[RankPlan], PipelineModel]:
    """Everything that a rank can find and check alone."""
    device = select_device(options.backend, world.local_rank)
    if device.type == "cpu":
        keep_freed_memory()
    _require_one_plan(options)
    plans = [source.rank_plan(pp_rank, options.timeout) for source in options.sources]
    if world.rank == 0 and options.trace is not None:
        claim(options.trace)
    model = options.model.build()
    for plan in plans:
        require_layers(model, plan.cut)
        if world.local_rank == 0:  # once per host
            warn_of_another_program(plan, options.training.program, device)
    return device, plans, model


def _share_cores(transport: ConnectedTransport) -> None:
    """Give this rank its share of the host's cores: threads that compete for cores slow each other down."""
    if "OMP_NUM_THREADS" in os.environ:
        return  # the user has decided
    in_container = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    threads = threads_per_rank(transport.control.ranks_on_host, in_container)
    torch.set_num_threads(threads)
    say(
        f"rank {transport.rank}: {threads} compute thread{'s' if threads > 1 else ''} ({len(usable_cores())} "
        f"cores, {transport.control.ranks_on_host} ranks on this host); --threads changes this"
    )


def train(
    options: RunOptions,
    plans: Sequence[RankPlan],
    model: PipelineModel,
    transport: Transport,
    device: torch.device,
    failures: Failures | None = None,
) -> list[RankReport]:
    """Run all steps of this rank; returns one report per plan."""
    watched = _unwatched if failures is None else failures.watched
    progress = None if failures is None else failures.progress
    loops: list[Loop] = []
    try:
        with watched("starting"):
            for plan in plans:
                label = f"plan {plan.plan_id[:12]}, " if len(plans) > 1 else ""
                loops.append(Loop(options, plan, model, transport, device, progress, label))
            shared = SharedTrace(transport, options.timeout) if options.trace is not None else None
        with GarbageCollection() as garbage:
            first = max(loop.first_step for loop in loops)
            for step in range(first, options.steps):
                patience = options.startup_patience if step == first else options.timeout
                with watched(f"step {step}"):
                    _step(loops, transport, step, patience)
                if step == first and failures is not None:
                    failures.started()
                garbage.step_done()
        with watched("ending the run"):
            for loop in loops:
                loop.end()
            reports = [loop.report for loop in loops]
            if shared is not None and options.trace is not None:
                traces = [RankTrace.of(r.lines[-1].plan_id, r.rank, r.newest()) for r in reports if r.lines]
                if traces:
                    shared.write(options.trace, traces)
    finally:
        for loop in loops:
            loop.close()
    return reports


def _unwatched(what: str) -> AbstractContextManager[None]:
    return nullcontext()


def _step(loops: Sequence[Loop], transport: Transport, step: int, patience: float) -> None:
    """One step of every plan, in turns."""
    for loop in loops:
        if len(loops) > 1:
            with naming_errors(transport.rank, "taking turns"):
                # Otherwise a rank that finishes early would seem to wait in the next plan's step.
                transport.barrier(patience)
        loop.step(step)


def _require_one_plan(options: RunOptions) -> None:
    training = options.training
    if len(options.sources) > 1 and (training.checkpoint or training.next_plan or training.trace_dir):
        raise InvalidRun(
            f"found {len(options.sources)} plans; checkpoints and plan changes need a run of one plan. "
            f"Give one plan, or omit --checkpoint-dir and --next-plan."
        )
