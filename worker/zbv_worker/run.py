"""One rank's run: get the plan, agree with the peers, build the stages, train.

This is what ``zbv-worker run`` does in each process that torchrun starts.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import nn
from zbv_solver.errors import InvalidInput, InvalidPlan
from zbv_solver.placement import Placement, PlacementKind
from zbv_solver.plan import identity, parse_orders, parse_plan_document
from zbv_solver.schema import problem_json
from zbv_solver.verify import verify_orders

from zbv_worker.agreement import Statement, agree
from zbv_worker.channels import Transport
from zbv_worker.distributed import Backend, DistributedTransport, World, select_device
from zbv_worker.errors import InvalidRun, naming_errors
from zbv_worker.executor import DEFAULT_LOOK_AHEAD, Executor, StepResult
from zbv_worker.launch import keep_freed_memory
from zbv_worker.merged_trace import RankTrace, SharedTrace, claim
from zbv_worker.model import ModelSpec, PipelineModel, build_stage
from zbv_worker.planned import WholePlan
from zbv_worker.rank_plan import RankPlan
from zbv_worker.stage import Stage
from zbv_worker.trace import RankReport

Runtime = Literal["zbv", "torch"]

_MEETING_SECONDS = 120.0
_NO_PLAN = "found no plan; give --server URL and --plan ID, or --plan-file FILE."


@dataclass(frozen=True)
class PlanSource:
    """Where a rank's list comes from: a service and a plan's id, or a file."""

    server: str | None = None
    plan_id: str | None = None
    file: Path | None = None

    def rank_plan(self, rank: int, timeout: float) -> RankPlan:
        """The list of one rank; raises :class:`InvalidRun`."""
        if self.file is not None:
            return _from_file(self.file, rank)
        if self.server is None or self.plan_id is None:
            raise InvalidRun(_NO_PLAN)
        return _from_service(self.server, self.plan_id, rank, timeout)

    def whole(self, timeout: float) -> WholePlan:
        """The lists of all ranks; raises :class:`InvalidRun`."""
        if self.file is not None:
            return WholePlan.of_file(self.file)
        if self.server is None or self.plan_id is None:
            raise InvalidRun(_NO_PLAN)
        return WholePlan.of_service(self.server, self.plan_id, timeout)


@dataclass(frozen=True)
class RunOptions:
    """How to run a plan, or several in turns.

    Attributes
    ----------
    sources
        Usually one. Several plans of the same ranks take turns step by step, each training a copy of its
        own: what disturbs the machine then disturbs all of them alike, so their times can be compared.
    result_dir
        Where reports go; with several plans, into one folder each, named by the plan's id.
    timeout
        Seconds that a rank waits for any one tensor within a step.
    threads
        Compute threads per rank on CPU; None leaves torch's choice.
    trace
        Where rank 0 writes when every action happened on every rank, on one clock.
    runtime
        What walks the lists: ours, or PyTorch's pipelining runtime (:mod:`zbv_worker.torch_runtime`).
    """

    sources: tuple[PlanSource, ...]
    model: ModelSpec
    steps: int
    backend: Backend = "gloo"
    timeout: float = 120.0
    look_ahead: int = DEFAULT_LOOK_AHEAD
    threads: int | None = None
    result_dir: Path | None = None
    trace: Path | None = None
    runtime: Runtime = "zbv"

    @property
    def meeting_timeout(self) -> float:
        """Seconds for the ranks to meet before the first step and after the last: not all start at once."""
        return max(self.timeout, _MEETING_SECONDS)


def run(options: RunOptions, world: World) -> list[RankReport]:
    """Run as one rank of the world; one report per plan.

    Raises
    ------
    WorkerError
        See :mod:`zbv_worker.errors`; the process should end then.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = select_device(options.backend, world.local_rank)
    if device.type == "cpu":
        keep_freed_memory()
    # What can be wrong on this rank alone is found before the others are met.
    wholes: list[WholePlan] = []
    if options.runtime == "torch":
        wholes = [source.whole(options.timeout) for source in options.sources]
        plans = [whole.of_rank(world.rank) for whole in wholes]
    else:
        plans = [source.rank_plan(world.rank, options.timeout) for source in options.sources]
    if world.rank == 0 and options.trace is not None:
        claim(options.trace)
    model = options.model.build()
    with naming_errors(world.rank, "meeting the other ranks"):
        transport = DistributedTransport(world, options.backend, device, options.meeting_timeout)
    try:
        reports = train(options, plans, model, transport, device, wholes)
        with naming_errors(world.rank, "ending the run"):
            transport.flush(options.meeting_timeout)
            transport.barrier(options.meeting_timeout)  # nobody hangs up while a peer still receives
    finally:
        transport.close()
    if options.result_dir is not None:
        for report in reports:
            report.write(options.result_dir / report.plan_id if len(reports) > 1 else options.result_dir)
    return reports


def train(
    options: RunOptions,
    plans: Sequence[RankPlan],
    model: PipelineModel,
    transport: Transport,
    device: torch.device,
    wholes: Sequence[WholePlan] = (),
) -> list[RankReport]:
    """Agree with the peers, build this rank's stages and run all steps; one report per plan.

    Parameters
    ----------
    wholes
        All ranks' parts of the plans, for PyTorch's runtime, which needs them.
    """
    trainings = [
        _Training(options, plan, model, transport, device, wholes[at] if wholes else None)
        for at, plan in enumerate(plans)
    ]
    shared = SharedTrace(transport, options.meeting_timeout) if options.trace is not None else None
    for step in range(options.steps):
        for training in trainings:
            if len(trainings) > 1:
                with naming_errors(transport.rank, "taking turns"):
                    # Else a rank that is done early would seem to wait in the next plan's step.
                    transport.barrier(options.meeting_timeout)
            training.step(step)
    reports = [training.report for training in trainings]
    if shared is not None and options.trace is not None:
        traces = [RankTrace.of(report.plan_id, report.rank, report.steps) for report in reports]
        shared.write(options.trace, traces)
    return reports


class _StepExecutor(Protocol):
    def step(self, step: int) -> StepResult:
        """Run every action of the plan once."""


class _Training:
    """One plan's stages, executor and optimizer on this rank."""

    def __init__(
        self,
        options: RunOptions,
        plan: RankPlan,
        model: PipelineModel,
        transport: Transport,
        device: torch.device,
        whole: WholePlan | None,
    ):
        keys = agree(transport, _statement(options, plan, transport), options.meeting_timeout)
        modules: list[nn.Module]
        self._executor: _StepExecutor
        if whole is not None:
            self._executor, modules = _torch_executor(options, whole, plan, model, device)
        else:
            with naming_errors(plan.rank, "opening the channels"):
                transport.open(keys, options.meeting_timeout)
            stages = build_stages(model, plan, device)
            modules = [stage.module for stage in stages.values()]
            self._executor = Executor(
                plan,
                stages,
                model,
                transport,
                device=device,
                timeout=options.timeout,
                look_ahead=options.look_ahead,
            )
        parameters = list(chain.from_iterable(module.parameters() for module in modules))
        self._optimizer = model.optimizer(parameters) if parameters else None
        self._label = f"plan {plan.plan_id[:12]}, " if len(options.sources) > 1 else ""
        self.report = RankReport(plan.plan_id, plan.rank)

    def step(self, step: int) -> None:
        """One step of the plan and of the optimizer."""
        result = self._executor.step(step)
        before = time.perf_counter()
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad()
        self.report.steps.append(result)
        self.report.optimizer_seconds.append(time.perf_counter() - before)
        if result.loss is not None:
            text = f"step {step}: {self._label}loss {result.loss:.4f}, {result.seconds:.3f} s"
            print(text, file=sys.stderr, flush=True)  # noqa: T201


def build_stages(model: PipelineModel, plan: RankPlan, device: torch.device) -> dict[int, Stage]:
    """The stages that a rank hosts, and no others."""
    n_stages = plan.placement.n_stages
    return {
        index: Stage(
            index,
            n_stages,
            build_stage(model, index, n_stages, device),
            plan.microbatches,
            model.loss if index == n_stages - 1 else None,
        )
        for index in plan.stages
    }


def _torch_executor(
    options: RunOptions, whole: WholePlan, plan: RankPlan, model: PipelineModel, device: torch.device
) -> tuple[_StepExecutor, list[nn.Module]]:
    """PyTorch's runtime for a rank's stages, and their modules."""
    from zbv_worker.torch_runtime import TorchExecutor  # refuses a torch whose runtime it does not know

    n_stages = plan.placement.n_stages
    modules = {index: build_stage(model, index, n_stages, device) for index in plan.stages}
    executor = TorchExecutor(
        whole, plan.rank, modules, model, device=device, backend=options.backend, timeout=options.timeout
    )
    return executor, list(modules.values())


def _statement(options: RunOptions, plan: RankPlan, transport: Transport) -> Statement:
    return Statement(
        plan_id=plan.plan_id,
        pp_rank=plan.rank,
        pp_degree=plan.placement.pp_degree,
        world_size=transport.world_size,
        model=options.model.fingerprint(plan.placement.n_stages),
        backend=options.backend,
        runtime=options.runtime,
        steps=options.steps,
        channels=plan.channels,
        traced=options.trace is not None,
    )


def _from_service(server: str, plan_id: str, rank: int, timeout: float) -> RankPlan:
    from zbv_service.client import Client, ClientError

    try:
        with Client(server, timeout=timeout) as client:
            answer = client.rank(plan_id, rank)
    except ClientError as error:
        raise InvalidRun(f"rank {rank}: no action list of plan {plan_id} from {server}: {error}") from error
    kinds: dict[str, PlacementKind] = {"v": "v", "loop": "loop", "single": "single"}
    if answer.placement not in kinds:
        raise InvalidRun(
            f"rank {rank}: found placement {answer.placement!r}; this worker knows {', '.join(kinds)}. "
            f"Use the same version as the service."
        )
    return RankPlan(
        plan_id=answer.plan_id,
        rank=answer.rank,
        placement=Placement(kinds[answer.placement], answer.pp_degree, answer.chunks),
        microbatches=answer.microbatches,
        actions=answer.actions,
        channels=answer.channels,
    )


def _from_file(path: Path, rank: int) -> RankPlan:
    try:
        problem, orders = parse_orders(parse_plan_document(json.loads(path.read_text())))
        verify_orders(problem, orders)
    except OSError as error:
        raise InvalidRun(f"--plan-file {path}: {error.strerror}.") from error
    except json.JSONDecodeError as error:
        raise InvalidRun(f"--plan-file {path}: not JSON ({error}).") from error
    except (InvalidInput, InvalidPlan) as error:
        raise InvalidRun(f"--plan-file {path}: {error}") from error
    if rank >= problem.pp_degree:
        raise InvalidRun(
            f"found rank {rank}; the plan has {problem.pp_degree} ranks. Start as many processes, or plan "
            f"for more ranks."
        )
    return RankPlan.of(identity(problem_json(problem), orders.all_text()), problem, orders, rank)
