"""Runs a plan with the real transport and executor on a fake cluster, and checks every number."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from zbv_solver.plans.channels import channels
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.problem import Problem
from zbv_worker.execution.executor import Executor, ExecutorOptions
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.execution.timeline import CudaTimeline, Launched
from zbv_worker.execution.turns import Overlap
from zbv_worker.transport.channels import Reduction, key_of
from zbv_worker.transport.nccl import NcclTransport
from zbv_worker.transport.nccl_operations import NCCL_LOOK_AHEAD
from zbv_worker.values.structure import Structure, TensorSpec

from support.fake_nccl.cluster import Cluster, FakeRank
from support.fake_nccl.communicators import CONNECTION_BYTES, NcclModes
from support.fake_nccl.device import DeviceModes
from support.fake_nccl.experts import exchange_between
from support.fake_nccl.shards import FakeShards
from support.fake_nccl.simulation import ModelError
from support.fake_nccl.stages import DTYPE, WIDTH, Expected, FakeBatches, FakeStage, evaluated, expected

SECONDS = {"F": 1e-3, "B": 2e-3, "I": 1e-3, "W": 1e-3}
TIMEOUT = 60.0
FIRST_TIMES = DeviceModes(lazy_loading=True, allocations_wait=True)
"""Whatever a GPU does for the first time waits for everything that is queued."""


@dataclass(frozen=True)
class ModelRun:
    steps: int = 2
    """The tensors of the first one pass through the host."""
    is_evaluated: bool = False
    """Whether an evaluation precedes each step."""
    replicas: int = 1
    is_sharded: bool = False
    """Whether the replicas divide parameters and sums of gradients."""
    has_experts: bool = False
    """Whether the stages of replicas exchange what they compute, as expert parallelism does."""
    overlap: Overlap | None = None
    """Runs pairs."""
    sums_over_ranks: bool = False
    ties: tuple[tuple[int, ...], ...] = ()
    """Sets of positions that add up a number after every step, as for the gradient of a tied parameter."""
    seed: int = 0
    look_ahead: int = NCCL_LOOK_AHEAD
    device: DeviceModes = field(default_factory=lambda: FIRST_TIMES)
    nccl: NcclModes = field(default_factory=NcclModes)
    transport: Callable[..., NcclTransport] = NcclTransport
    """Creates the transport; a test passes a wrong one."""
    checks_memory: bool = False
    """Whether no device memory may stay allocated at the end. Takes a while."""
    stage: type[FakeStage] = FakeStage
    """The class of the stages."""
    plan: Callable[[RankPlan], RankPlan] = lambda plan: plan
    """Changes a rank's part of the plan; a test passes a wrong change."""
    sizes: Literal["equal", "headers", "known", "stated"] = "equal"
    """Whether microbatches are equal, or differ, and how ranks know their sizes: by a header for every
    activation, by a header for the first of every size, or because the model states them."""

    @property
    def is_varied(self) -> bool:
        return self.sizes != "equal"


@dataclass(frozen=True)
class RankUse:
    kernels: int
    """The most kernels of NCCL that ran at once."""
    unsent: int
    """The most sends that were queued or running at once."""


def run_plan(problem: Problem, orders: Orders, how: ModelRun) -> list[RankUse]:
    """Run a plan; returns what each global rank used.

    Raises
    ------
    ModelError
        For a deadlock, a use of memory without an order, a wrong number, or whatever the model refuses.
    """
    ranks, replicas = problem.pp_degree * how.replicas, how.replicas
    cluster = Cluster(ranks, replicas=replicas, seed=how.seed, device=how.device, nccl=how.nccl)
    wanted = [
        [
            expected(problem.n_stages, problem.microbatches, step, replica, is_varied=how.is_varied)
            for replica in range(how.replicas)
        ]
        for step in range(how.steps)
    ]

    def main(here: FakeRank) -> RankUse:
        run = _RankRun(here, problem, orders, how)
        for step in range(how.steps):
            if how.is_evaluated:
                run.evaluate(step)
            run.launch(step)
        run.read()
        for step in range(how.steps):
            run.check(step, wanted[step])
        use = run.close()
        if how.checks_memory:
            del run
            gc.collect()
            kept = here.device.memory.users()
            _require(not kept, f"device memory that nothing frees, last written by {kept}")
        return use

    return cluster.run(main)


class _RankRun:
    """One rank with the real transport and executor."""

    def __init__(self, here: FakeRank, problem: Problem, orders: Orders, how: ModelRun):
        self._here = here
        self._how = how
        self._transport = transport = how.transport(
            here.control,
            here.torch_device,
            TIMEOUT,
            api=here.nccl,
            cuda=here.cuda,
            clock=here.clock,
            sums_over_ranks=how.sums_over_ranks,
        )
        self._plan = how.plan(RankPlan.of("plan", problem, orders, transport.pp_rank))
        transport.open(sorted({key_of(channel) for channel in channels(problem, orders)}), TIMEOUT)
        transport.link(how.ties, TIMEOUT)
        taken, counted = here.device.connected_bytes, transport.communicator_bytes
        _require(abs(taken - counted) < CONNECTION_BYTES, f"{counted} bytes of communicators, not {taken}")
        self._stages = {s: how.stage(s, problem.n_stages, here.device, SECONDS) for s in self._plan.stages}
        self._shards = FakeShards(here, transport, self._stages) if how.is_sharded else None
        if how.has_experts:
            exchange_between(here, transport, self._stages)
        self._sums: list[Reduction] = []
        self._launched: Launched | None = None
        self._losses: list[dict[int, float]] = []
        self._weights: list[dict[int, Tensor]] = []
        self._totals: list[Tensor] = []
        self._tied: list[list[Tensor]] = []
        batches = FakeBatches(transport.replica, how.is_varied)
        sizes = [batches.times(index) for index in range(problem.microbatches)]
        stated = [Structure.of_tensor(TensorSpec((WIDTH * size,), DTYPE)) for size in sizes]
        options = ExecutorOptions(
            look_ahead=how.look_ahead,
            on_stage_done=self._sum_over_replicas,
            timeline=CudaTimeline(here.torch_device, clock=here.clock, cuda=here.cuda),
            stated=stated if how.sizes == "stated" else (),
            overlap=how.overlap,
        )
        device, stages = here.torch_device, self._stages
        self._executor = Executor(
            self._plan, stages, batches, transport, device=device, timeout=TIMEOUT, options=options
        )
        if how.sizes in ("headers", "known"):
            self._executor.expect(sizes if how.sizes == "known" else None)

    def _sum_over_replicas(self, stage: int) -> None:
        if self._shards is not None:
            self._shards.done(stage)
            return
        self._sums.append(self._transport.sum_over_replicas(self._stages[stage].weight))

    def launch(self, step: int) -> None:
        """Queue a step and what an optimizer would do after it, without a wait of the host."""
        if self._shards is not None:
            self._shards.begin()
        launched = self._executor.launch(step)
        self.read()
        self._launched = launched
        for reduction in self._sums:
            reduction.wait(TIMEOUT)
        self._sums.clear()
        if self._shards is not None:
            self._weights.append(self._shards.finish())
        else:
            self._weights.append({index: stage.weight.clone() for index, stage in self._stages.items()})
        tied = [positions for positions in self._how.ties if self._transport.pp_rank in positions]
        self._tied.append([self._launch_tie(positions) for positions in tied])
        if self._how.sums_over_ranks:  # as for the norm of all gradients
            own = torch.stack(list(self._weights[-1].values())).sum()
            self._totals.append(self._transport.sum_over_ranks(own, TIMEOUT))
        for stage in self._stages.values():
            stage.weight.zero_()
        kept = [*self._weights[-1].values(), *self._tied[-1], *self._totals[-1:]]
        self._here.device.memory.device.peak += sum(each.nbytes for each in kept)  # a loop would free them

    def read(self) -> None:
        """Take the losses of the newest step, as a loop does while it launches the next one."""
        if self._launched is not None:
            self._losses.append(self._launched.result().losses)

    def _launch_tie(self, positions: tuple[int, ...]) -> Tensor:
        """The sum of the positions' gradients, all stages and elements together."""
        total = torch.stack(list(self._weights[-1].values())).sum().reshape(1)
        self._transport.sum_over_positions(positions, total).wait(TIMEOUT)
        return total

    def check(self, step: int, wanted: list[Expected]) -> None:
        """Compare a step's losses and weight gradients, summed over the replicas, with the expected ones."""
        has_last = max(self._stages) == max(wanted[0].weights)
        losses = self._losses[step]
        _require(losses == (wanted[self._transport.replica].losses if has_last else {}), f"losses {losses}")
        for stage, weight in self._weights[step].items():
            numbers = weight.tolist()
            own = slice(None) if self._shards is None else self._shards.rows
            _require(numbers == _added(wanted, stage)[own], f"weight gradients {numbers} of stage {stage}")
        tied = [positions for positions in self._how.ties if self._transport.pp_rank in positions]
        for positions, sum_of_tie in zip(tied, self._tied[step], strict=True):
            rank_of = self._plan.placement.rank_of
            total = sum(sum(_added(wanted, s)) for s in wanted[0].weights if rank_of[s] in positions)
            _require(float(sum_of_tie) == total, f"the sum {float(sum_of_tie)} over {positions}")
        if self._how.sums_over_ranks:
            total = sum(sum(_added(wanted, stage)) for stage in wanted[0].weights)
            found = float(self._totals[step])
            _require(found == total * self._how.replicas, f"the sum {found} over all ranks")

    def evaluate(self, step: int) -> None:
        """Evaluate between two steps, and compare the losses."""
        found = self._executor.evaluate(step)
        n, m = self._plan.placement.n_stages, self._plan.microbatches
        wanted = evaluated(n, m, step, self._transport.replica) if n - 1 in self._stages else {}
        _require(found == wanted, f"losses {found} of an evaluation")

    def close(self) -> RankUse:
        """End in order; returns what the rank used."""
        self._transport.flush(TIMEOUT)
        self._transport.barrier(TIMEOUT)
        self._executor.close()
        self._transport.close()
        return RankUse(self._here.device.most_running, self._here.device.most_unsent)


def _added(wanted: list[Expected], stage: int) -> list[float]:
    """A stage's weight gradients, added up over the replicas."""
    return [sum(parts) for parts in zip(*(found.weights[stage] for found in wanted), strict=True)]


def _require(condition: bool, wrong: str) -> None:
    if not condition:
        raise ModelError(f"found {wrong}, which is wrong")
