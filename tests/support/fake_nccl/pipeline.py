"""Runs a plan with the real transport and executor on a fake cluster, and checks every number."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from zbv_solver.plans.channels import channels
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import Problem
from zbv_worker.execution.executor import DEFAULT_LOOK_AHEAD, Executor, ExecutorOptions
from zbv_worker.execution.rank_plan import RankPlan, Remote, lower
from zbv_worker.execution.timeline import CudaTimeline
from zbv_worker.transport.channels import key_of
from zbv_worker.transport.nccl import NcclTransport

from support.fake_nccl.cluster import Cluster, FakeRank
from support.fake_nccl.communicators import NcclModes
from support.fake_nccl.device import DeviceModes
from support.fake_nccl.simulation import ModelError
from support.fake_nccl.stages import Expected, FakeBatches, FakeStage, expected

SECONDS = {"F": 1e-3, "B": 2e-3, "I": 1e-3, "W": 1e-3}
TIMEOUT = 60.0


@dataclass(frozen=True)
class ModelRun:
    """How a plan runs on the model.

    Attributes
    ----------
    transport
        Creates the transport; a test passes a wrong one.
    checks_memory
        Whether nothing but the stages' weights may stay allocated at the end. Takes a while.
    plan
        Changes a rank's part of the plan; a test passes a wrong change.
    """

    steps: int = 2
    replicas: int = 1
    seed: int = 0
    look_ahead: int = DEFAULT_LOOK_AHEAD
    device: DeviceModes = field(default_factory=DeviceModes)
    nccl: NcclModes = field(default_factory=NcclModes)
    transport: Callable[..., NcclTransport] = NcclTransport
    checks_memory: bool = False
    plan: Callable[[RankPlan], RankPlan] = lambda plan: plan


@dataclass(frozen=True)
class RankUse:
    """What a rank used.

    Attributes
    ----------
    kernels
        The most kernels of NCCL that ran at once.
    communicators
        Those that the rank is a member of.
    receive_buffers
        Receive buffers of the transport's pool, without those of headers.
    account
        The most receive buffers that the plan and the look-ahead need.
    unsent
        The most sends that were queued or running at once.
    """

    kernels: int
    communicators: int
    receive_buffers: int
    account: int
    unsent: int


def run_plan(problem: Problem, orders: Orders, how: ModelRun) -> list[RankUse]:
    """Run a plan; returns what each global rank used.

    Raises
    ------
    ModelError
        For a deadlock, a use of memory without an order, a wrong number, or whatever the model refuses.
    """
    cluster = Cluster(
        problem.pp_degree * how.replicas,
        replicas=how.replicas,
        seed=how.seed,
        device=how.device,
        nccl=how.nccl,
    )
    keys = sorted({key_of(channel) for channel in channels(problem, orders)})
    wanted = [
        [expected(problem.n_stages, problem.microbatches, step, replica) for replica in range(how.replicas)]
        for step in range(how.steps)
    ]

    def main(here: FakeRank) -> RankUse:
        transport = how.transport(
            here.control, here.torch_device, TIMEOUT, api=here.nccl, cuda=here.cuda, clock=here.clock
        )
        plan = how.plan(RankPlan.of("plan", problem, orders, transport.pp_rank))
        transport.open(keys, TIMEOUT)
        stages = {index: FakeStage(index, problem.n_stages, here.device, SECONDS) for index in plan.stages}
        sums: list[Any] = []
        executor = Executor(
            plan,
            stages,
            FakeBatches(transport.replica),
            transport,
            device=here.torch_device,
            timeout=TIMEOUT,
            options=ExecutorOptions(
                look_ahead=how.look_ahead,
                on_stage_done=lambda stage: sums.append(transport.sum_over_replicas(stages[stage].weight)),
                timeline=CudaTimeline(here.torch_device, clock=here.clock, cuda=here.cuda),
            ),
        )
        launched, weights = [], list[dict[int, Tensor]]()
        for step in range(how.steps):
            launched.append(executor.launch(step))
            for reduction in sums:
                reduction.wait(TIMEOUT)
            sums.clear()
            # As an optimizer does: queued behind the sums, without a wait of the host.
            weights.append({index: stage.weight.clone() for index, stage in stages.items()})
            for stage in stages.values():
                stage.weight.zero_()
        for step in range(how.steps):
            results = {stage: weight.tolist() for stage, weight in weights[step].items()}
            _check(wanted[step], transport.replica, launched[step].result().losses, results)
        transport.flush(TIMEOUT)
        transport.barrier(TIMEOUT)
        pools = transport._buffers._pools
        use = RankUse(
            kernels=here.device.most_running,
            communicators=sum(here.rank in c.ranks for c in cluster.communicators.by_key.values()),
            receive_buffers=sum(len(pool) for spec, pool in pools.items() if spec.dtype.is_floating_point),
            account=receive_account(plan, how.look_ahead),
            unsent=here.device.most_unsent,
        )
        transport.close()
        if how.checks_memory:
            del executor, launched
            weights.clear()
            gc.collect()
            kept = [use for use in here.device.memory.users() if use != "zero_"]
            _require(not kept, f"device memory that nothing frees, last written by {kept}")
        return use

    return cluster.run(main)


def receive_account(plan: RankPlan, look_ahead: int) -> int:
    """The most receive buffers in use at once: what actions hold, and what is posted and not yet used.

    An activation is held from its F, and a gradient from its I or B, until the end of the W or B. A channel
    has posted the look-ahead beyond the furthest tensor that was used so far
    (:class:`zbv_worker.transport.endpoints.Inbox`).
    """
    channels = {key_of(c): c.transfers for c in plan.channels if c.receiver == plan.rank}
    posted = {key: min(look_ahead, len(transfers)) for key, transfers in channels.items()}
    used = held = 0
    most = sum(posted.values())
    held_of: dict[tuple[int, int], int] = {}
    for instruction in lower(plan):
        stage, letter, microbatch = instruction.action
        if isinstance(instruction.source, Remote):
            key, transfer = instruction.source.channel, instruction.source.transfer
            end = channels[key].index(transfer) + 1 + look_ahead
            posted[key] = max(posted[key], min(end, len(channels[key])))
            used, held = used + 1, held + 1
            held_of[stage, microbatch] = held_of.get((stage, microbatch), 0) + 1
        most = max(most, held + sum(posted.values()) - used)
        if letter in "BW":
            held -= held_of.pop((stage, microbatch), 0)
    return most


def _check(
    wanted: list[Expected], replica: int, losses: dict[int, float], weights: dict[int, list[float]]
) -> None:
    """Compare the losses and the summed weight gradients of a step."""
    has_last = bool(weights) and max(weights) == max(wanted[0].weights)
    _require(losses == (wanted[replica].losses if has_last else {}), f"losses {losses}")
    for stage, weight in weights.items():
        total = [sum(parts) for parts in zip(*(found.weights[stage] for found in wanted), strict=True)]
        _require(weight == total, f"the weight gradient {weight} of stage {stage}")


def _require(condition: bool, wrong: str) -> None:
    if not condition:
        raise ModelError(f"found {wrong}, which is wrong")
