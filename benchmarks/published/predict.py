"""The step time and the memory that zbv predicts for a run.

What a run does not say is the same for all sources:

- ZeRO stage 1, and with tensor parallelism sequence parallelism.
- Nothing is recomputed.
- Cut: blocks are dealt evenly. If they do not divide, and with two more they would, embedding and head count
  as a block each; otherwise the last stages have fewer.
- States: those of Megatron-LM, with fp16 or bf16 (:mod:`zbv_models.layouts.executor_memory`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from zbv_models.estimate.config import PRECISION_OF, PRECISIONS
from zbv_models.estimate.layers import LayerEstimate, Training, estimate_model
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.model_layers import model_flops
from zbv_models.estimate.model_rules import fits
from zbv_models.estimate.states import StateBytes
from zbv_models.fixed_orders.executor_cut import dealt
from zbv_models.layouts.cluster import Cluster
from zbv_models.layouts.estimated_layout import EstimatedLayout, layers_on_ranks
from zbv_models.layouts.executor_memory import megatron
from zbv_models.layouts.layout import Layout, Recompute
from zbv_models.layouts.setting import SECONDS, Setting
from zbv_solver.construct.baselines import baseline
from zbv_solver.errors import InvalidInput
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.cut import Cut, Link
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.problem import Problem, objective_value
from zbv_solver.problem.stages import Placement
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.run import search
from zbv_solver.timing.start_times import evaluate

from benchmarks.published.runs import HIDDEN, MeasuredRun, cluster_of, model_of

ENDS = ("embedding", "patches", "projector", "prediction", "head")
"""Layers that are on the first or the last stage, not dealt."""
RESERVED_SHARE = 1.1
"""Memory that PyTorch reserves over what tensors take, as it was known when runs were held out (docs)."""
TAKEN_BYTES = 4e9
"""What a device needs in addition, for CUDA and NCCL: 1.7 and 10 GB in two published runs (docs)."""
MEMORY_OF_1F1B = {"zb-1p": 1.0, "zb-2p": 2.0}
"""Activations that a rank of such a schedule may hold, in those of 1F1B's first rank (Qi et al. 2023, §4)."""
TERA = 1e12


@dataclass(frozen=True)
class Prediction:
    """What zbv predicts for a run."""

    step_time: float
    """Seconds."""
    memory: float
    """Bytes, of the kind and of the rank that the run states."""
    is_too_large: bool
    """Whether the run needs more memory than its device has."""


def predict(run: MeasuredRun) -> Prediction:
    """Predict a run.

    Raises :class:`InvalidInput` when the degrees do not divide what they share.
    """
    cluster = cluster_of(run)
    estimated = _estimated(run, _padded(model_of(run), run), cluster)
    layered = estimated.problem
    problem, orders = _ordered(run, layered, _bounds(run, layered))
    timing = evaluate(problem, orders)
    peak = timing.peak_memory[-1] if run.memory_rank == -1 else max(timing.peak_memory)
    return Prediction(
        step_time=objective_value(problem.objective, timing) * SECONDS
        + estimated.once(layers_on_ranks(problem)),
        memory=_taken(peak) if run.memory_kind == "device" else peak,
        is_too_large=_taken(max(timing.peak_memory)) > cluster.size,
    )


def published_step(run: MeasuredRun) -> float | None:
    """The measured step in seconds; None if the run has none."""
    if run.step_time_s is not None or run.model_tflops is None:
        return run.step_time_s
    model = model_of(run)
    return model_flops(model) * run.global_batch / (run.model_tflops * TERA * run.devices)


def _padded(model: Transformer, run: MeasuredRun) -> Transformer:
    """Tensor parallelism divides the vocabulary, padded to a multiple of 128 t (Megatron-LM)."""
    unit = 128 * run.tensor_parallel
    return model.model_copy(update={"vocabulary": -(-model.vocabulary // unit) * unit})


def _taken(tensors: float) -> float:
    """Memory that a device needs for tensors of this size."""
    return RESERVED_SHARE * tensors + TAKEN_BYTES


def _estimated(run: MeasuredRun, model: Transformer, cluster: Cluster) -> EstimatedLayout:
    """The layers of a run."""
    recompute = run.recompute or "none"
    modules = () if isinstance(recompute, str) else recompute
    kind: Recompute = "none" if recompute in ("none", ()) else "full" if recompute == "full" else "selective"
    layout = Layout(
        run.tensor_parallel,
        run.context_parallel,
        run.expert_parallel,
        run.replicas,
        run.pipeline_parallel,
        run.microbatch_size,
        run.microbatches,
        1 if run.zero_stage is None else run.zero_stage,
        kind,
        "tp-cp-dp-pp",
    )
    dtype = model_of(run).dtype
    state = StateBytes(gradients=PRECISIONS[PRECISION_OF[dtype]].gradients, dtype=dtype)
    stated: dict[str, Any] = dict(run.states.items())
    training = Training(
        state=replace(state, **stated),
        account=megatron,
        modules=frozenset(modules),
        fused_gradients=run.fused_gradients,
    )
    degrees = layout.degrees(cluster)
    if run.sequence_parallel is not None:
        degrees = replace(degrees, sequence_parallel=run.sequence_parallel)
    if not fits(model, degrees):
        raise InvalidInput.at("", f"run {run.id!r}: its degrees do not divide the model.")
    estimate = estimate_model(
        model, degrees, cluster.device, layout.links(cluster), training, run.microbatch_size
    )
    if not degrees.sequence_parallel:
        # Each device of a group sends a part (Narayanan et al. 2021, §4.1).
        parts = [replace(each, output_bytes=each.output_bytes // degrees.tensor) for each in estimate.layers]
        estimate = replace(estimate, layers=tuple(parts))
    if "gradients" in run.hides:
        estimate = replace(estimate, layers=tuple(map(_reducing_behind_compute, estimate.layers)))
    return EstimatedLayout(layout, Setting(model, training, cluster), (estimate,))


def _reducing_behind_compute(layer: LayerEstimate) -> LayerEstimate:
    """A layer whose gradients are reduced during the last backward; parameters are gathered afterwards."""
    exposed = (1 - HIDDEN) * layer.step.gradient_reduction
    return replace(layer, step=replace(layer.step, gradient_reduction=exposed))


def _bounds(run: MeasuredRun, layered: LayeredProblem) -> tuple[int, ...]:
    """The boundaries of the stages, as layer indices."""
    is_block = [not name.startswith(ENDS) for name in layered.model.names]
    blocks, first = sum(is_block), is_block.index(True)
    stages = list(run.stages or dealt(blocks, run.n_stages))
    if sum(stages) != blocks:
        raise InvalidInput.at(
            "", f"run {run.id!r}: its stages have {sum(stages)} blocks; the model has {blocks}."
        )
    ends = [first + done for done in accumulate(stages)][:-1]
    return (0, *ends, layered.model.n_layers)


def _ordered(run: MeasuredRun, layered: LayeredProblem, bounds: tuple[int, ...]) -> tuple[Problem, Orders]:
    """The run's order: 1F1B, interleaved with several stages per rank, or one without bubbles.

    1F1B's ranks wait for each other between steps, for the norm of all gradients. Those of zero-bubble
    schedules begin the next step at once, and correct it afterwards if they must (Qi et al. 2023, §5).
    """
    is_1f1b = run.schedule == "1f1b"
    is_blocking = is_1f1b and "pipeline" not in run.hides
    link = layered.link
    if is_blocking and run.transfers_in_turn and link is not None:
        link = Link(2 * link.latency, link.bandwidth / 2)  # one direction after the other
    layered = replace(
        layered, limit=None, objective="makespan" if is_1f1b else "span", link=link, blocking=is_blocking
    )
    is_recomputed = run.n_stages * (layered.model.each[0].recompute is not None,)
    p, chunks = run.pipeline_parallel, run.virtual_stages
    placement = Placement.of("loop", p, chunks) if chunks > 1 else Placement.of("single", p)
    problem = layered.cut_into(placement, Cut.at(bounds, is_recomputed))
    own, orders = baseline("interleaved-1f1b" if chunks > 1 else "1f1b", problem)
    if is_1f1b:
        return own, orders
    peaks, static = evaluate(own, orders).peak_memory, own.memory.static
    most = max(peak - rest for peak, rest in zip(peaks, static, strict=True))
    limit = tuple(rest + MEMORY_OF_1F1B[run.schedule] * most for rest in static)
    limited = replace(own, memory=replace(own.memory, limit=limit))
    return own, search(limited, SearchOptions(effort="quick")).orders
