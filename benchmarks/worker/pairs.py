"""A step with pairs, measured and planned: two pipeline ranks of two expert-parallel processes each.

Layers compute by sleeping, and exchange tokens with a real all-to-all over gloo that a sleep makes longer. So
a step shows what taking turns costs, and whether one half computes while the other communicates, on a machine
with few cores. Every process has the plan's costs, so both lengths are in one unit.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import zbv_worker as zbv
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from zbv_worker.measure.rehearse.sleeping_stage import pause_until, sharpen_timer
from zbv_worker.tracing.merged_trace import END, START
from zbv_worker.transport.world import World

from benchmarks.findings import Finding, Target
from benchmarks.worker.ranks import Workload, on_ranks

if TYPE_CHECKING:
    from zbv_solver.plans.orders import Orders
    from zbv_solver.problem.problem import Problem

MOST = 1.05
PP_DEGREE, EXPERTS = 2, 2
ROWS, WIDTH = 4, 8


class PairsWorkload(Workload):
    """Stages of equal layers, each of attention, an exchange, experts, and an exchange."""

    microbatches: int = 6
    layers: int = 2
    """Per stage."""
    action_ms: float = 240.0
    """F and I of a stage, communication included; W takes none of it."""
    communication: float = 1 / 3
    """The part of F and I that is exchanges."""
    steps: int = 2
    """Measured steps, after two to warm up."""


def measure(workload: PairsWorkload) -> list[Finding]:
    """Compare the same plan with pairs and with their halves one after the other."""
    from zbv_solver.timing.start_times import evaluate

    document, problem, orders = _plan(workload)
    request = {"workload": workload.model_dump(), "plan": {"problem": document, "ranks": orders.all_text()}}
    found = []
    for name, planned, target in (
        ("pairs", orders, Target(MOST)),
        ("one by one", orders.without_pairs(), None),
    ):
        answers = on_ranks("pairs", {**request, "is_paired": target is not None}, PP_DEGREE * EXPERTS)
        # the median step, as long as on the slowest pipeline
        measured = float(np.median(np.max([answer["steps"] for answer in answers], axis=0)))
        ratio = measured / evaluate(problem, planned).makespan
        found.append(Finding(f"{name}: measured / planned step", ratio, "", target))
        found.append(Finding(f"{name}: step", measured, "ms"))
    return found


def _plan(workload: PairsWorkload) -> tuple[dict[str, Any], Problem, Orders]:
    """A problem in milliseconds, and DualPipeV's order with I and W, whose neighbours are pairs."""
    from zbv_solver.construct.pairs import joined, starts
    from zbv_solver.problem.reading import parse_problem

    costs = {"forward": workload.action_ms, "backward_input": workload.action_ms, "backward_weight": 0.1}
    hidden = workload.action_ms * workload.communication
    document = {
        "pp_degree": PP_DEGREE,
        "microbatches": workload.microbatches,
        "objective": "makespan",
        "costs": {**costs, "communication": {"forward": hidden, "backward_input": hidden}},
    }
    problem = parse_problem(document)
    *_, (_, orders) = starts(problem)
    return document, problem, joined(problem, orders)


# --- on a rank


class Sleep(torch.autograd.Function):
    """Takes time in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, nanoseconds: int) -> Tensor:
        """The tensor itself."""
        ctx.nanoseconds = nanoseconds
        pause_until(time.perf_counter_ns() + nanoseconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The gradient of the input."""
        pause_until(time.perf_counter_ns() + ctx.nanoseconds)
        return gradients[0], None


class Wire:
    """Where a process exchanges tokens: one exchange at a time, which takes at least a given time."""

    def __init__(self, group: Any, nanoseconds: int):
        self._group, self._nanoseconds = group, nanoseconds
        self._free = 0

    def exchange(self, x: Tensor) -> Tensor:
        """Return the rows that all processes have for this one."""
        out = torch.empty_like(x)
        self._free = arrives = max(time.perf_counter_ns(), self._free) + self._nanoseconds
        dist.all_to_all_single(out, x.contiguous(), group=self._group)
        pause_until(arrives)
        return out


class Exchange(torch.autograd.Function):
    """An all-to-all of rows; the backward sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: Wire) -> Tensor:
        """The rows that arrive."""
        ctx.wire = wire
        return wire.exchange(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The gradient of the input."""
        return ctx.wire.exchange(gradients[0]), None


class Layer(nn.Module):
    """Attention, an exchange, an expert, and an exchange."""

    def __init__(self, wire: Wire, nanoseconds: int):
        super().__init__()
        self.expert = nn.Linear(WIDTH, WIDTH)
        self._wire, self._nanoseconds = wire, nanoseconds

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width), same shape."""
        here: Tensor = Exchange.apply(Sleep.apply(x, self._nanoseconds), self._wire)  # type: ignore[no-untyped-call]
        found: Tensor = Exchange.apply(self.expert(Sleep.apply(here, self._nanoseconds)), self._wire)  # type: ignore[no-untyped-call]
        return found


def _one_by_one(forward: Any, backward: Any) -> None:
    forward()
    backward()


def on_rank(request: Mapping[str, Any], world: World) -> dict[str, Any]:
    """The length of every measured step, in milliseconds."""
    workload = PairsWorkload(**request["workload"])
    sharpen_timer()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (PP_DEGREE, EXPERTS), mesh_dim_names=("pp", "ep"))
    parts = 2 * workload.layers  # an exchange and a computation each
    exchange = 1e6 * workload.action_ms * workload.communication / parts
    compute = 1e6 * workload.action_ms * (1 - workload.communication) / parts
    wire = Wire(mesh["ep"].get_group(), round(exchange))
    layers = [partial(Layer, wire, round(compute))] * (2 * PP_DEGREE * workload.layers)
    overlap = None if request["is_paired"] else _one_by_one
    x = torch.randn(ROWS * workload.microbatches, WIDTH, generator=torch.Generator().manual_seed(0))
    steps = []
    with zbv.Pipeline(request["plan"], layers, nn.functional.mse_loss, mesh=mesh, overlap=overlap) as pipe:
        for step in range(2 + workload.steps):
            dist.barrier()
            pipe.step(x, x)
            times = [trace.times[0] for trace in pipe.trace()]
            length = max(part[:, END].max() for part in times) - min(part[:, START].min() for part in times)
            if step >= 2:
                steps.append(float(length) / 1e6)
    dist.destroy_process_group()
    return {"steps": steps}
