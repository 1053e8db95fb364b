"""Plans layers that have no plan yet: measures them on the running ranks, and plans on rank 0.

The measurement trains copies of the layers, so it changes neither the layers nor torch's random numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from zbv_solver.errors import ZbvError
from zbv_solver.export import quantities
from zbv_solver.export.quantities import counted, percent
from zbv_solver.plans.plan import Plan
from zbv_solver.plans.reading import parse_plan

from zbv_worker.errors import InvalidRun, WorkerError, describe_error, naming_errors
from zbv_worker.execution.plan_source import asking_service
from zbv_worker.host.process import say
from zbv_worker.measure.profile.layers import to_layered_document
from zbv_worker.measure.profile.profile import ProfileOptions, RankProfile, rank_json, read_rank
from zbv_worker.measure.profile.rank import RankProfiler
from zbv_worker.model.checks import has_ties
from zbv_worker.model.layer_list import LayerList
from zbv_worker.model.loss_module import loss_module
from zbv_worker.model.model import Model
from zbv_worker.model.protocol import Layered, Tied
from zbv_worker.model.spec import ModelSpec
from zbv_worker.stage.program import Program
from zbv_worker.transport.channels import Transport
from zbv_worker.transport.world import Backend

_REPEATS = 5
_SEARCH_SECONDS = 20.0
_USABLE = 0.9
"""Share of a GPU's memory that a plan may use; the rest is for the allocator and the communicators."""


def plan_layers(
    layers: Layered,
    loss: Callable[[Any, Any], Any] | None,
    example: tuple[Any, ...],
    transport: Transport,
    device: torch.device,
    *,
    microbatches: int,
    program: Program,
    backend: Backend,
    timeout: float,
    service: str | None = None,
) -> dict[str, Any]:
    """Measure layers and plan them for the running ranks. Collective; rank 0 says what it chose.

    The optimizer's memory is that of AdamW. On GPUs, plans keep within the smallest GPU's memory, and may
    recompute activations.

    Parameters
    ----------
    loss
        By default the loss of the layers.
    example
        Input, target and perhaps keywords of one microbatch.
    microbatches
        The number of microbatches per step.
    timeout
        Seconds to wait for another rank, and for the plan.
    service
        The URL of the service that plans if the planner is not installed here.

    Returns
    -------
    The plan as a document, the same on every rank.

    Raises
    ------
    InvalidRun
        If the layers cannot be measured or planned.
    """
    if not 2 <= len(example) <= 3:
        raise InvalidRun(
            f"example: found {len(example)} values; must be the input, the target and perhaps the keywords "
            f"of one microbatch."
        )
    p = transport.layout.pp_degree
    if len(layers.layer_names()) < p:
        raise InvalidRun(
            f"found {len(layers.layer_names())} layers and {p} ranks; every rank needs at least one layer. "
            f"Start fewer ranks, or divide the model into more layers."
        )
    options = ProfileOptions(
        model=ModelSpec("layers:given"),
        pp_degree=p,
        microbatches=microbatches,
        repeats=_REPEATS,
        by_layer=True,
        recompute=device.type == "cuda",
        backend=backend,
        program=program,
        timeout=timeout,
    )
    if transport.rank == 0:
        say(f"zbv: measuring {len(layers.layer_names())} layers on {counted(p, 'rank')}, to plan them")
    given = loss if loss is not None else getattr(layers, "loss", None)
    if given is None:
        raise InvalidRun("planning needs the loss, because the last rank computes it. Pass loss=.")
    with _unchanged(loss_module(given, layers), device):
        ranks = _measured(options, _measurable(layers, given, example), transport, device)
    limit = _memory_limit(transport, device, timeout)
    with naming_errors(transport.rank, "planning the layers"):
        answers = transport.gather(_answer(options, layers, ranks, limit, service, transport.rank), timeout)
    document, error = answers[0]
    if error is not None:
        raise InvalidRun(error)
    if transport.rank == 0:
        for line in described(parse_plan(document)):
            say(line)
    return dict(document)


def described(plan: Plan) -> list[str]:
    """What was chosen, in a few lines."""
    problem, metrics, units = plan.problem, plan.metrics, plan.problem.units
    lines = [
        f"zbv: planned {problem.microbatches} microbatches on {counted(problem.pp_degree, 'rank')}: step "
        f"{quantities.time(plan.objective, units)}, bubble rate {percent(metrics.bubble_rate, 1)}, "
        f"at most {quantities.memory(max(metrics.peak_memory), units)} per rank, placement "
        f"{problem.placement.kind}"
    ]
    partition = () if problem.model is None else problem.model.partition
    recomputed = () if problem.model is None else problem.model.cut.recompute or ()
    for rank, stages in enumerate(problem.placement.stages_of if partition else ()):
        named = [
            _span(partition[stage]) + (" (recomputed)" if recomputed and recomputed[stage] else "")
            for stage in stages
        ]
        lines.append(f"zbv: rank {rank}: {'; '.join(named)}")
    for baseline in plan.baselines:
        if baseline.name == "even-cut":
            span = baseline.makespan if problem.objective == "makespan" else baseline.span
            fits = "" if baseline.fits else ", and not fit into memory"
            more = quantities.relative(span, plan.objective)
            lines.append(f"zbv: an even cut would take {quantities.time(span, units)} ({more}){fits}")
    return lines


def _measurable(layers: Layered, loss: Callable[[Any, Any], Any], example: tuple[Any, ...]) -> Model:
    """The layers as a model with one microbatch, which training does not change."""

    def mean(output: Any, target: Any) -> Tensor:
        found = loss(output, target)
        value: Tensor = found[0] / max(1.0, float(found[1])) if isinstance(found, tuple) else found
        return value

    copies = layers.untouched() if isinstance(layers, LayerList) else _Copies(layers)
    model = Model(copies, loss=mean, data=lambda step, index: example)
    model.loss_module = None  # the loss itself is measured, and must not be trained
    return model


class _Copies:
    """Layers whose object may return the same modules again, as copies."""

    def __init__(self, layers: Layered):
        self._layers = layers
        self.layer_names = layers.layer_names

    def build_layers(self, names: Sequence[str], device: torch.device) -> nn.Sequential:
        """Copies of some layers."""
        return copy.deepcopy(self._layers.build_layers(names, device))

    def tied_parameters(self) -> Sequence[tuple[str, str]]:
        """Pairs of names of parameters that layers share."""
        return self._layers.tied_parameters() if isinstance(self._layers, Tied) else ()


@contextmanager
def _unchanged(loss: nn.Module | None, device: torch.device) -> Iterator[None]:
    """A context that moves a loss to the device, and restores its gradients and buffers."""
    if loss is None:
        yield
        return
    loss.to(device)
    gradients = [(parameter, parameter.grad) for parameter in loss.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    buffers = [(buffer, buffer.clone()) for buffer in loss.buffers()]
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for buffer, value in buffers:
            buffer.copy_(value)


def _measured(
    options: ProfileOptions, model: Model, transport: Transport, device: torch.device
) -> list[RankProfile]:
    """The measurements of the first column's ranks. Collective."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        mine = RankProfiler(options, transport, device, model, is_silent=True).measure()
    with naming_errors(transport.rank, "measuring the layers"):
        found = transport.gather([transport.column, rank_json(mine)], options.timeout)
    profiles = [read_rank(document) for column, document in found if column == 0]
    return sorted(profiles, key=lambda profile: profile.rank)


def _memory_limit(transport: Transport, device: torch.device, timeout: float) -> float | None:
    """The memory that every rank may use, in bytes; None on CPUs. Collective."""
    own = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    with naming_errors(transport.rank, "comparing the ranks' memory"):
        found = [each for each in transport.gather(own, timeout) if each is not None]
    return _USABLE * min(found) if found else None


def _answer(
    options: ProfileOptions,
    layers: Layered,
    ranks: list[RankProfile],
    limit: float | None,
    service: str | None,
    rank: int,
) -> tuple[Any, str | None]:
    """Rank 0's plan, or the reason why there is none."""
    if rank != 0:
        return None, None
    problem = to_layered_document(options, ranks, is_tied=has_ties(layers))  # type: ignore[arg-type]  # reads ties only
    problem["memory"]["limit"] = limit
    try:
        return _planned(problem, service, options.timeout), None
    except (ZbvError, WorkerError) as error:
        return None, f"no plan for these layers: {error}"
    except Exception as error:  # every rank must hear of it
        return None, f"no plan for these layers: {describe_error(error)}."


def _planned(problem: Mapping[str, Any], service: str | None, timeout: float) -> dict[str, Any]:
    """The plan of a problem, made here if the planner is installed, else by the service."""
    try:
        return _planned_here(problem)
    except ModuleNotFoundError as error:
        if service is None:
            raise InvalidRun(
                f"planning needs {error.name}, which is not installed. Install zbv[solver], or pass "
                f"service=URL of a service that plans."
            ) from error
    with asking_service(service, timeout, "no plan") as client:
        search = client.wait(client.submit(problem, {"effort": "quick"}).id, timeout=timeout)
        return client.plan_document(str(search.plan_id))


def _planned_here(problem: Mapping[str, Any]) -> dict[str, Any]:
    from zbv_solver import parse, plan
    from zbv_solver.plans.plan import plan_json

    return plan_json(plan(parse(problem), "quick", time_limit=_SEARCH_SECONDS))


def _span(names: tuple[str, ...]) -> str:
    """The layers of a stage in words."""
    if len(names) < 3:
        return ", ".join(names) or "no layer"
    return f"{names[0]} … {names[-1]} ({len(names)} layers)"
