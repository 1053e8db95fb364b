"""One rank's run: get the plan, meet the peers, train.

This is what ``zbv-worker run`` does in each process that torchrun starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import torch

from zbv_worker.errors import InvalidRun, naming_errors
from zbv_worker.execution.planned_cut import require_layers
from zbv_worker.execution.progress import CurrentProgress
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.host.cores import keep_freed_memory, threads_per_rank, usable_cores
from zbv_worker.model.protocol import PipelineModel, Weighted
from zbv_worker.tracing.merged_trace import RankTrace, SharedTrace, claim
from zbv_worker.training.ending import Ending
from zbv_worker.training.garbage import GarbageCollection
from zbv_worker.training.guard import Guard
from zbv_worker.training.options import RunOptions, Setting
from zbv_worker.training.program_warning import warn_of_another_program
from zbv_worker.training.report import RankReport
from zbv_worker.training.training import Training
from zbv_worker.transport.channels import Transport
from zbv_worker.transport.connect import open_transport
from zbv_worker.transport.connected import ABORT_SECONDS, ConnectedTransport
from zbv_worker.transport.gloo_control import GlooControl
from zbv_worker.transport.rendezvous import refuse
from zbv_worker.transport.world import Layout, World, select_device


def run(
    options: RunOptions,
    world: World,
    progress: CurrentProgress | None = None,
    ending: Ending | None = None,
) -> list[RankReport]:
    """Run as one rank of the world; returns one report per plan.

    Parameters
    ----------
    progress
        Updated with the rank's progress during the run.
    ending
        Ends this process as soon as another rank is lost. The caller must pass it every error of this
        function.

    Raises
    ------
    WorkerError
        See :mod:`zbv_worker.errors`; the process should end then.
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
    progress = progress or CurrentProgress()
    patience, training = options.startup_patience, options.training
    with naming_errors(world.rank, "meeting the other ranks"):
        control = GlooControl(world, patience, layout)
    guard = Guard(control, progress, options.timeout, patience, ending)
    with naming_errors(world.rank, "connecting"):
        sums = training.needs_sums_over_ranks or isinstance(model, Weighted)
        transport = open_transport(control, options.backend, device, patience, sums_over_ranks=sums)
    guard.connected(transport)
    if options.threads is None and device.type == "cpu":
        _share_cores(transport)
    try:
        reports = train(options, plans, model, transport, device, progress, guard.started)
        with naming_errors(world.rank, "ending the run"):
            transport.flush(options.timeout)
            guard.end()
            transport.barrier(options.timeout)  # no rank closes while a peer still receives
        _write(reports, options)  # first, because NCCL may hang while its groups are destroyed
    except BaseException:
        if ending is None:  # an ending publishes the reason first
            transport.abort(ABORT_SECONDS)
        raise
    if ending is None:
        transport.close()
    else:
        ending.close(transport)
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
    print(  # noqa: T201 - a rank's log
        f"rank {transport.rank}: {threads} compute thread{'s' if threads > 1 else ''} ({len(usable_cores())} "
        f"cores, {transport.control.ranks_on_host} ranks on this host); --threads changes this",
        file=sys.stderr,
        flush=True,
    )


def train(
    options: RunOptions,
    plans: Sequence[RankPlan],
    model: PipelineModel,
    transport: Transport,
    device: torch.device,
    progress: CurrentProgress | None = None,
    on_started: Callable[[], None] | None = None,
) -> list[RankReport]:
    """Run all steps of this rank; returns one report per plan.

    Parameters
    ----------
    on_started
        Called after the first step of every plan.
    """
    setting = Setting(options, device, transport, progress)
    trainings: list[Training] = []
    try:
        for plan in plans:
            label = f"plan {plan.plan_id[:12]}, " if len(plans) > 1 else ""
            trainings.append(Training(setting, plan, model, label))
        shared = SharedTrace(transport, options.timeout) if options.trace is not None else None
        _steps(trainings, setting, on_started)
        reports = [training.report for training in trainings]
        if shared is not None and options.trace is not None:
            traces = [RankTrace.of(r.lines[-1].plan_id, r.rank, r.newest()) for r in reports if r.lines]
            if traces:
                shared.write(options.trace, traces)
    finally:
        for training in trainings:
            training.close()
    return reports


def _steps(trainings: Sequence[Training], setting: Setting, on_started: Callable[[], None] | None) -> None:
    run, first = setting.run, max(training.first_step for training in trainings)
    with GarbageCollection() as garbage:
        for step in range(first, run.steps):
            for training in trainings:
                if len(trainings) > 1:
                    with naming_errors(setting.transport.rank, "taking turns"):
                        # Otherwise a rank that finishes early would seem to wait in the next plan's step.
                        setting.transport.barrier(run.startup_patience if step == first else run.timeout)
                training.step(step)
            if step == first and on_started is not None:
                on_started()
            garbage.step_done()
    for training in trainings:
        training.end()


def _require_one_plan(options: RunOptions) -> None:
    training = options.training
    if len(options.sources) > 1 and (training.checkpoint or training.next_plan or training.trace_dir):
        raise InvalidRun(
            f"found {len(options.sources)} plans; checkpoints and plan changes need a run of one plan. "
            f"Give one plan, or omit --checkpoint-dir and --next-plan."
        )
