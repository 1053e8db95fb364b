"""The pipeline of a GPU report: one rank profiles, plans, trains some steps and compares its gradients.

All checks of a pipeline measure the same things; they differ in transport, number of ranks and precision.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from zbv_solver.plans.channels import channels
from zbv_solver.plans.orders import Action, Orders
from zbv_solver.problem.problem import Problem

from zbv_worker.execution.build_stages import build_stages
from zbv_worker.execution.executor import Executor, ExecutorOptions
from zbv_worker.execution.fetch_ahead import DEFAULT_FETCH_AHEAD
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.execution.step import Launched, StepResult
from zbv_worker.gpu_report.check import Place, largest
from zbv_worker.measure.live_bytes import watching
from zbv_worker.measure.profile.profile import (
    ProfileOptions,
    RankProfile,
    rank_json,
    read_rank,
    to_problem,
)
from zbv_worker.measure.profile.rank import RankProfiler
from zbv_worker.measure.ranks import connected
from zbv_worker.model.checks import build_stage
from zbv_worker.model.protocol import PipelineModel
from zbv_worker.stage.program import Program
from zbv_worker.stage.stage import Stage
from zbv_worker.tracing.merged_trace import RankTrace
from zbv_worker.transport.channels import Transport, key_of
from zbv_worker.transport.world import Backend

GradientsByName = dict[str, Tensor]
Variant = Literal["float32", "tf32", "bfloat16", "compiled"]

PROGRAMS: dict[Variant, Program] = {
    "float32": Program(),
    "tf32": Program(),
    "bfloat16": Program(precision="bfloat16"),
    "compiled": Program(is_compiled=True),
}
"""The program of each variant; tf32 is a setting of torch."""

_EXACT = ("float32", "compiled")
"""The variants with the gradients of plain float32."""


def v_orders(problem: Problem) -> Orders:
    """A simple V plan with split backwards, so that the report needs no solver.

    In each round, every rank runs one action that is ready: I before F before W, later stages before earlier
    ones.
    """
    last = problem.n_stages - 1
    ranks: list[list[Action]] = [[] for _ in range(problem.pp_degree)]
    ready = [Action(0, "F", j) for j in range(problem.microbatches)]
    while ready:
        chosen: dict[int, Action] = {}
        for action in sorted(ready, key=_urgency):
            chosen.setdefault(problem.placement.rank_of[action.stage], action)
        for rank, action in chosen.items():
            ranks[rank].append(action)
            ready.remove(action)
            stage, letter, j = action
            if letter == "F":
                ready.append(Action(stage + 1, "F", j) if stage < last else Action(last, "I", j))
            elif letter == "I":
                ready.append(Action(stage, "W", j))
                if stage:
                    ready.append(Action(stage - 1, "I", j))
    return Orders.from_actions(ranks)


def _urgency(action: Action) -> tuple[int, int, int]:
    return "IFW".index(action.letter), -action.stage, action.microbatch


@dataclass(frozen=True)
class Planned:
    """A plan of the profiled costs."""

    orders: Orders
    span: float | None
    """Seconds of a step; None without the planner, whose package is then in ``lack``."""
    activations: tuple[float, ...]
    """Bytes per rank that the plan needs for everything but parameters, gradients, buffers and optimizer."""
    lack: str | None = None


def measure_pipeline(place: Place, backend: Backend, variant: Variant) -> dict[str, Any]:
    """Profile, plan and train as one rank; returns JSON."""
    options = place.options
    use_tf32(variant == "tf32")
    with connected(place.world, backend, place.device, options.timeout) as transport:
        profiled = profile_options(place, backend, variant)
        mine = RankProfiler(profiled, transport, place.device).measure()
        ranks = [read_rank(each) for each in transport.gather(rank_json(mine), options.timeout)]
        problem = to_problem(profiled, ranks)
        planned = _planned(problem, ranks, transport, options.timeout)
        found = Trained(place, transport, problem, planned.orders, variant).measure()
        return {
            "backend": backend,
            "variant": variant,
            "profile": rank_json(mine),
            "planned_seconds": planned.span,
            "planned_bytes": None if planned.lack else planned.activations[transport.rank],
            "lack": planned.lack,
            **found,
        }


def profile_options(place: Place, backend: Backend, variant: Variant) -> ProfileOptions:
    """The profile of a pipeline check."""
    options = place.options
    return ProfileOptions(
        options.model,
        place.world.world_size,
        options.microbatches,
        repeats=options.repeats,
        backend=backend,
        program=PROGRAMS[variant],
        timeout=options.timeout,
    )


def use_tf32(on: bool) -> None:
    """Let matrix products of float32 tensors use TF32, or not."""
    torch.backends.cuda.matmul.fp32_precision = "tf32" if on else "ieee"


def _planned(problem: Problem, ranks: list[RankProfile], transport: Transport, timeout: float) -> Planned:
    """The plan that rank 0 finds; without the planner, a simple V plan."""
    mine = _search(problem) if transport.rank == 0 else {}
    found = transport.gather(mine, timeout)[0]
    orders = Orders.from_text(found["ranks"]) if "ranks" in found else v_orders(problem)
    kept = [each.static.total - each.static.receives - each.static.workspace for each in ranks]
    peaks = found.get("peak_memory", [float("inf")] * len(kept))
    return Planned(
        orders,
        found["span"] * 1e-6 if "span" in found else None,
        tuple(peak - static for peak, static in zip(peaks, kept, strict=True)),
        found.get("lack"),
    )


def _search(problem: Problem) -> dict[str, Any]:
    """A plan as JSON, or what its search lacks: a GPU node needs no planner."""
    try:
        from zbv_solver.search.options import SearchOptions
        from zbv_solver.search.run import search
    except ModuleNotFoundError as error:
        return {"lack": f"the planner needs {error.name}; install zbv[solver]"}
    plan = search(problem, SearchOptions(effort="quick"))
    return {
        "ranks": plan.orders.all_text(),
        "span": plan.metrics.span,
        "peak_memory": list(plan.metrics.peak_memory),
    }


class Trained:
    """One rank's training steps of a plan, without an optimizer; every step has the same data."""

    def __init__(
        self, place: Place, transport: Transport, problem: Problem, orders: Orders, variant: Variant
    ):
        self._place = place
        self._transport = transport
        self._variant = variant
        self._timeout = place.options.timeout
        self._model = place.options.model.build()
        self._plan = plan = RankPlan.of("gpu-report", problem, orders, transport.rank)
        transport.open([key_of(channel) for channel in channels(problem, orders)], self._timeout)
        self._stages: Mapping[int, Stage] = build_stages(
            self._model, plan, place.device, program=PROGRAMS[variant]
        )
        self._modules = [stage.module for stage in self._stages.values()]
        self._executor = Executor(
            plan,
            self._stages,
            self._model,
            transport,
            device=place.device,
            timeout=self._timeout,
            options=ExecutorOptions(fetch_ahead=DEFAULT_FETCH_AHEAD if place.device.type == "cuda" else 0),
        )

    def measure(self) -> dict[str, Any]:
        """Measure steps, gradients, memory and waits of the host; returns JSON."""
        passed = self._passed_bytes()
        trace = RankTrace.of("gpu-report", self._transport.rank, self._consecutive_steps())
        found = {
            "trace": trace.document(),
            "relative_error": self._relative_error(),
            "held_bytes": self._held_bytes(),
            "passed_bytes": passed,
            "host_waits": self._host_waits(),
        }
        self._executor.close()
        return found

    def _consecutive_steps(self) -> list[StepResult]:
        """Steps as in training: each is launched before the results of the one before are known."""
        results, before = [], self._executor.launch(0)
        for _ in range(self._place.options.steps):
            launched = self._executor.launch(0)
            results.append(before.result())
            before = launched
        return [*results, before.result()]

    def _step(self) -> None:
        self._transport.barrier(self._timeout)
        self._executor.step(0)

    def _passed_bytes(self) -> int:
        """Run a first step, which creates gradients; returns the bytes of all tensors that stages pass on.

        No plan accounts for them, because how long one waits depends on the stage that needs it.
        """
        sizes: dict[int, int] = {}
        last = self._plan.placement.n_stages - 1

        def noting(index: int) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
            def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
                gradient = inputs[0].nbytes if index > 0 else 0
                sizes[index] = gradient + (output.nbytes if index < last else 0)

            return note

        hooks = [stage.module.register_forward_hook(noting(index)) for index, stage in self._stages.items()]
        self._step()
        for hook in hooks:
            hook.remove()
        return self._plan.microbatches * sum(sizes.values())

    def _relative_error(self) -> float | None:
        """The error of the gradients against one process; None if not finite, or if products are inexact."""
        if self._variant not in _EXACT:
            return None
        for module in self._modules:
            module.zero_grad()
        self._step()
        microbatches = self._place.options.microbatches
        reference = reference_gradients(self._model, microbatches, self._place.device)
        error = error_of_all(gradients_of(self._modules), reference, self._transport, self._timeout)
        return error if math.isfinite(error) else None  # JSON has no infinity

    def _held_bytes(self) -> int:
        """The most bytes that one step needs in addition to those held before."""
        with watching(self._place.device) as held:
            self._step()
        return held.peak

    def _host_waits(self) -> list[str] | None:
        """What torch says about waits of the host within a step; None on a CPU."""
        if self._place.device.type != "cuda":
            return None
        self._transport.barrier(self._timeout)
        launched: list[Launched] = []
        found = host_waits(lambda: launched.append(self._executor.launch(0)), torch.cuda)
        launched[0].result()
        return found


def host_waits(step: Callable[[], object], cuda: Any) -> list[str]:
    """The calls in a step that make the host wait for the device, as torch's warnings name them.

    Parameters
    ----------
    cuda
        Has ``set_sync_debug_mode``, as ``torch.cuda``.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            cuda.set_sync_debug_mode("default")
    return [f"{each.message} ({each.filename}:{each.lineno})" for each in caught]


def error_of_all(
    mine: GradientsByName, reference: GradientsByName, transport: Transport, timeout: float
) -> float:
    """The largest relative error of any parameter on any rank; infinite if a parameter is missing.

    Every rank compares its own gradients, so none of them is sent.
    """
    own = {name: reference[name] for name in mine if name in reference}
    gathered = transport.gather([sorted(mine), relative_error(mine, own)], timeout)
    names = {name for found, _ in gathered for name in found}
    return largest(error for _, error in gathered) if names == reference.keys() else float("inf")


def reference_gradients(model: PipelineModel, microbatches: int, device: torch.device) -> GradientsByName:
    """Gradients of plain autograd on the uncut model."""
    module = build_stage(model, 0, 1, device)
    for index in range(microbatches):
        input, target, *_ = (tensor.to(device) for tensor in model.microbatch(0, index))
        loss = model.loss(module(input), target) / microbatches
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
    return gradients_of([module])


def relative_error(found: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """The largest |found - reference| / |reference| (norms) of any parameter; inf if one is missing."""
    if found.keys() != reference.keys():
        return float("inf")
    errors = (
        float((found[name] - right).norm() / right.norm().clamp_min(1e-12))
        for name, right in reference.items()
    )
    return largest(errors)


def gradients_of(modules: Iterable[nn.Module]) -> GradientsByName:
    """The gradients of modules, on the host."""
    return {
        name: parameter.grad.cpu()
        for module in modules
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
