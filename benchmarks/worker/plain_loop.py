"""A rank's actions in a plain loop: only compute, or compute and plain transfers."""

from __future__ import annotations

from collections import Counter, deque
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override
from zbv_solver.plans.orders import Action
from zbv_worker.execution.executor import DEFAULT_LOOK_AHEAD
from zbv_worker.execution.rank_plan import RankPlan, Remote, lower
from zbv_worker.model.checks import build_stage
from zbv_worker.model.protocol import PipelineModel
from zbv_worker.stage.split_backward import defer_weight_gradients
from zbv_worker.stage.weight_grads import WeightGrads
from zbv_worker.transport.channels import ChannelKey
from zbv_worker.transport.connected import ConnectedTransport
from zbv_worker.transport.gloo import GlooTransport
from zbv_worker.transport.sends import SendWork

from benchmarks.worker.torch_schedules import StepData

_CPU = torch.device("cpu")
_PATIENCE = timedelta(seconds=120)


class PlainLoop:
    """Runs every F, I, W and B of a rank's list on existing tensors.

    Every stage gets the first stage's data as input and ones as gradients: the same work without transfers.
    """

    def __init__(self, model: PipelineModel, plan: RankPlan, data: StepData):
        self._actions = plan.actions
        self._last = plan.placement.n_stages - 1
        self._modules = {
            index: build_stage(model, index, plan.placement.n_stages, _CPU) for index in plan.stages
        }
        self._recorders = {index: defer_weight_gradients(module) for index, module in self._modules.items()}
        self._loss = model.loss
        self._data = data
        self._split = {(a.stage, a.microbatch) for a in plan.actions if a.letter == "I"}

    def step(self, step: int) -> None:
        """Run the list once; gradients accumulate."""
        outputs: dict[tuple[int, int], Tensor] = {}
        queues: dict[tuple[int, int], WeightGrads] = {}
        for action in self._actions:
            self._before(action)
            stage, letter, microbatch = action
            cell = (stage, microbatch)
            if letter == "W":
                queues.pop(cell).run()
            elif letter == "F":
                queue = WeightGrads() if cell in self._split else None
                if queue is not None:
                    queues[cell] = queue
                with self._recorders[stage].into(queue):
                    outputs[cell] = self._forward(stage, microbatch)
            else:
                output = outputs.pop(cell)
                output.backward(torch.ones_like(output))  # type: ignore[no-untyped-call]  # torch's own
            self._after(action)

    def _before(self, action: Action) -> None:
        """Receive nothing."""

    def _after(self, action: Action) -> None:
        """Send nothing."""

    def _forward(self, stage: int, microbatch: int) -> Tensor:
        x, target = self._data.microbatch(0, microbatch)
        if stage:
            x = x.detach().requires_grad_()
        output: Tensor = self._modules[stage](x)
        return self._loss(output, target) if stage == self._last else output


class BareLoop(PlainLoop):
    """The same with the plan's transfers, on its channels and in its order.

    Any program that runs this list over gloo must do this: post each receive some time before it is needed,
    start each send, and wait for both. The received tensors are not used, and the sent tensor is always the
    same.

    Parameters
    ----------
    transport
        A transport with the plan's open channels.
    tensor
        The tensor of every transfer.
    """

    def __init__(
        self,
        model: PipelineModel,
        plan: RankPlan,
        data: StepData,
        transport: ConnectedTransport,
        tensor: Tensor,
        look_ahead: int = DEFAULT_LOOK_AHEAD,
    ):
        super().__init__(model, plan, data)
        if not isinstance(transport, GlooTransport):
            raise TypeError("bare transfers are measured over gloo")
        self._tensor = tensor
        self._look_ahead = look_ahead
        program = lower(plan)
        self._sources = {i.action: i.source.channel for i in program if isinstance(i.source, Remote)}
        self._sinks = {i.action: i.sink.channel for i in program if isinstance(i.sink, Remote)}
        # The transport's own wires, without what it adds to them.
        self._in = {key: transport._wires_in[key] for key in set(self._sources.values())}
        self._out = {key: transport._senders[key].wire for key in set(self._sinks.values())}
        self._counts = Counter(self._sources.values())
        self._buffers = [torch.empty_like(tensor) for _ in range(look_ahead)]

    @override
    def step(self, step: int) -> None:
        self._left = dict(self._counts)
        self._posted: dict[ChannelKey, deque[dist.Work]] = {key: deque() for key in self._in}
        self._sent: list[SendWork] = []
        for key in self._in:
            for _ in range(self._look_ahead):
                self._post(key)
        super().step(step)
        for work in self._sent:
            work.wait(_PATIENCE)

    def _post(self, key: ChannelKey) -> None:
        if self._left[key]:
            self._left[key] -= 1
            self._posted[key].append(self._in[key].receive(self._buffers[self._left[key] % self._look_ahead]))

    @override
    def _before(self, action: Action) -> None:
        key = self._sources.get(action)
        if key is not None:
            self._posted[key].popleft().wait(_PATIENCE)
            self._post(key)

    @override
    def _after(self, action: Action) -> None:
        key = self._sinks.get(action)
        if key is not None:
            self._sent.append(self._out[key].send(self._tensor))
