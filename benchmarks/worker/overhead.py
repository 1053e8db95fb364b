"""CPU time per action that the executor adds to the compute of the stages.

A plan of tiny stages runs in turns on the executor and in a plain loop in the same processes: F, I, W and B
of the modules, with plain sends and receives on the plan's channels. Any program that uses gloo has this
cost, with caches as cold as waiting leaves them. What the executor takes beyond it is its overhead.

Only CPU time counts, so waiting for peers and other processes does not.
"""

from __future__ import annotations

import gc
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from zbv_solver.plans.plan import plan_json
from zbv_worker.execution.executor import DEFAULT_LOOK_AHEAD
from zbv_worker.execution.plan_source import WholePlan
from zbv_worker.execution.rank_plan import RankPlan, Remote, lower
from zbv_worker.model.checks import build_stage, checked_microbatch
from zbv_worker.model.spec import ModelSpec
from zbv_worker.pipeline.batch import StepData
from zbv_worker.stage.recorder import defer_weight_gradients
from zbv_worker.stage.weight_grads import WeightGrads
from zbv_worker.transport.channels import ChannelKey
from zbv_worker.transport.connected import ConnectedTransport
from zbv_worker.transport.gloo import GlooTransport
from zbv_worker.transport.gloo_ends import SendWork

from benchmarks.findings import Finding, Target, median_interval
from benchmarks.worker.ranks import MEETING_SECONDS, Workload, bare_executor, meeting, on_ranks, plan_of

if TYPE_CHECKING:
    from zbv_solver.plans.orders import Action
    from zbv_worker.model.protocol import PipelineModel
    from zbv_worker.transport.world import World

EXECUTOR, BARE = "executor", "plain loop with bare transfers"
MOST_US = 45.0
_CPU = torch.device("cpu")
_PATIENCE = timedelta(seconds=MEETING_SECONDS)
Sample = tuple[int, int]
"""CPU time of a turn in nanoseconds: of the thread that runs the plan, and of the whole process."""


class OverheadWorkload(Workload):
    """The plan, and how often it runs."""

    pp_degrees: tuple[int, ...] = (2, 4)
    """Numbers of ranks; one measurement each."""
    microbatches: int = 16
    in_a_row: int = 4
    """Steps per turn, as in training; together they are one sample."""
    rounds: int = 20
    """Measured turns of every runtime, after ``warm_up`` turns."""
    warm_up: int = 2


def measure(workload: OverheadWorkload) -> list[Finding]:
    """Measure every number of ranks."""
    found: list[Finding] = []
    for p in workload.pp_degrees:
        plan = plan_json(plan_of(p, workload.microbatches))
        found += findings(p, on_ranks("overhead", {"workload": workload.model_dump(), "plan": plan}, p))
    return found


def findings(p: int, answers: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Findings from the samples: medians over the rounds of the mean over the ranks."""
    per_rank = [
        (np.asarray(each[EXECUTOR]) - np.median(np.asarray(each[BARE]), axis=0)) / (1e3 * each["actions"])
        for each in answers
    ]
    samples: NDArray[np.float64] = np.mean(per_rank, axis=0)  # by round
    found = []
    for at, whose in enumerate(("executor's thread", "whole process")):
        value, interval = median_interval(samples[:, at])
        title = f"p={p}: CPU per action beyond compute and bare transfers, {whose}"
        found.append(Finding(title, value, "us", Target(MOST_US), interval))
    return found


# --- on a rank


class BareLoop:
    """Runs every F, I, W and B of a rank's list on existing tensors, with the plan's transfers.

    Every stage gets the first stage's data as input and ones as gradients. Any program that runs this list
    over gloo must do this: post each receive some time before it is needed, start each send, and wait for
    both. The received tensors are not used, and the sent tensor is always the first microbatch, whose shape
    all stages of the model keep.

    Parameters
    ----------
    transport
        A transport with the plan's open channels.
    """

    def __init__(self, model: PipelineModel, plan: RankPlan, data: StepData, transport: ConnectedTransport):
        if not isinstance(transport, GlooTransport):
            raise TypeError("bare transfers are measured over gloo")
        self._actions, self._loss, self._data = plan.actions, model.loss, data
        self._last = plan.placement.n_stages - 1
        self._modules = {
            index: build_stage(model, index, plan.placement.n_stages, _CPU) for index in plan.stages
        }
        self._recorders = {index: defer_weight_gradients(module) for index, module in self._modules.items()}
        self._split = {(a.stage, a.microbatch) for a in plan.actions if a.letter == "I"}
        self._tensor = data.microbatch(0, 0).input
        program = lower(plan)
        self._sources = {i.action: i.source.channel for i in program if isinstance(i.source, Remote)}
        self._sinks = {i.action: i.sink.channel for i in program if isinstance(i.sink, Remote)}
        # The transport's own wires, without what it adds to them.
        self._in = {key: transport._wires_in[key] for key in set(self._sources.values())}
        self._out = {key: transport._senders[key]._wire for key in set(self._sinks.values())}
        self._counts = Counter(self._sources.values())
        self._buffers = [torch.empty_like(self._tensor) for _ in range(DEFAULT_LOOK_AHEAD)]

    def step(self, step: int) -> None:
        """Run the list once; gradients accumulate."""
        self._left = dict(self._counts)
        self._posted: dict[ChannelKey, deque[dist.Work]] = {key: deque() for key in self._in}
        sent: list[SendWork] = []
        for key in self._in:
            for _ in self._buffers:
                self._post(key)
        outputs: dict[tuple[int, int], Tensor] = {}
        queues: dict[tuple[int, int], WeightGrads] = {}
        for action in self._actions:
            if (source := self._sources.get(action)) is not None:
                self._posted[source].popleft().wait(_PATIENCE)
                self._post(source)
            self._compute(action, outputs, queues)
            if (sink := self._sinks.get(action)) is not None:
                group, peer = self._out[sink]
                sent.append(group.send([self._tensor], peer, 0))
        for work in sent:
            work.wait(_PATIENCE)

    def _compute(
        self,
        action: Action,
        outputs: dict[tuple[int, int], Tensor],
        queues: dict[tuple[int, int], WeightGrads],
    ) -> None:
        stage, letter, microbatch = action
        cell, recorder = (stage, microbatch), self._recorders[stage]
        if letter == "W":
            queues.pop(cell).run()
            return
        recorder.queue = None
        if letter == "F":
            if cell in self._split:
                recorder.queue = queues[cell] = WeightGrads()
            outputs[cell] = self._forward(stage, microbatch)
        else:
            output = outputs.pop(cell)
            output.backward(torch.ones_like(output))  # type: ignore[no-untyped-call]  # torch's own

    def _forward(self, stage: int, microbatch: int) -> Tensor:
        x, target, _ = self._data.microbatch(0, microbatch)
        if stage:
            x = x.detach().requires_grad_()
        output: Tensor = self._modules[stage](x)
        return self._loss(output, target) if stage == self._last else output

    def _post(self, key: ChannelKey) -> None:
        if self._left[key]:
            self._left[key] -= 1
            buffer = self._buffers[self._left[key] % len(self._buffers)]
            group, peer = self._in[key]
            self._posted[key].append(group.recv([buffer], peer, 0))


def on_rank(request: Mapping[str, Any], world: World) -> dict[str, Any]:
    """CPU time of every round, by runtime."""
    workload = OverheadWorkload(**request["workload"])
    plan, model = WholePlan.of_document(request["plan"]), ModelSpec("zbv_worker.models.tiny:tiny").build()
    mine = plan.of_rank(world.rank)
    data = StepData()  # made before any step, so that no loop is charged for it
    data.microbatches = [checked_microbatch(model.microbatch(0, at)) for at in range(mine.microbatches)]
    with meeting(world) as transport:
        executor, _ = bare_executor(model, plan, transport, data)
        steps: dict[str, Callable[[int], object]] = {
            EXECUTOR: executor.step,
            BARE: BareLoop(model, mine, data, transport).step,
        }
        samples: dict[str, list[Sample]] = {name: [] for name in steps}
        gc.freeze()  # garbage collection would be charged to the runtime that happens to run
        for turn in range(workload.warm_up + workload.rounds):
            for name, step in steps.items():
                transport.barrier(MEETING_SECONDS)
                sample = _cpu_of(step, workload.in_a_row)
                if turn >= workload.warm_up:
                    samples[name].append(sample)
    return {**samples, "actions": workload.in_a_row * len(mine.actions)}


def _cpu_of(step: Callable[[int], object], steps: int) -> Sample:
    thread, process = time.thread_time_ns(), time.process_time_ns()
    for number in range(steps):
        step(number)
    return time.thread_time_ns() - thread, time.process_time_ns() - process
