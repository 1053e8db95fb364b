"""Costs and memory of a model's layers on one device.

A block consists of two halves, attention and MLP. Its figures are the sums of theirs, except for the
workspace, which is the larger one, because a device runs one action at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from zbv_solver.estimate import times, traffic
from zbv_solver.estimate.activations import (
    STATISTIC_BYTES,
    Held,
    Shapes,
    attention_tensors,
    embedding_tensors,
    head_tensors,
    mlp_tensors,
    totals,
)
from zbv_solver.estimate.config import EstimateConfig, ModelConfig
from zbv_solver.estimate.flops import Flops, attention_flops, core_flops, head_flops, mlp_flops
from zbv_solver.estimate.parameters import (
    Parameters,
    StaticBytes,
    attention_parameters,
    embedding_parameters,
    head_parameters,
    mlp_parameters,
    static_bytes,
)
from zbv_solver.estimate.times import Triple


@dataclass(frozen=True)
class Running:
    """Costs and memory of a layer, with or without recomputation.

    Attributes
    ----------
    times
        Microseconds of F, I and W.
    after_forward, after_input
        Bytes that a microbatch holds after F and after I; after W it holds none.
    workspace
        Additional bytes while an action runs.
    """

    times: Triple
    after_forward: int
    after_input: int
    workspace: int


@dataclass(frozen=True)
class LayerEstimate:
    """One layer, on one device.

    Attributes
    ----------
    flops
        Operations of its matrix products.
    recomputed
        Its costs when its stage is recomputed; None if it cannot be recomputed.
    parameters
        Number of parameters.
    static
        Bytes of parameters, gradients and optimizer, as a whole number.
    output_bytes
        Size of the output, and of its gradient.
    repeat
        Number of copies; None for a single layer, which keeps its name.
    """

    name: str
    flops: Flops
    plain: Running
    recomputed: Running | None
    parameters: int
    static: StaticBytes
    output_bytes: int
    repeat: int | None = None


def estimate_layers(config: EstimateConfig) -> tuple[LayerEstimate, ...]:
    """The layers in model order: embedding, blocks (or their halves), head."""
    attention, mlp = _attention(config), _mlp(config)
    blocks: list[LayerEstimate] = []
    if config.parallel.granularity == "half":
        for block in range(config.model.layers):
            blocks.append(replace(attention, name=f"block.{block}.attention"))
            blocks.append(replace(mlp, name=f"block.{block}.mlp"))
    else:
        blocks.append(_block(config, attention, mlp))
    return (_embedding(config), *blocks, _head(config))


def _block(config: EstimateConfig, attention: LayerEstimate, mlp: LayerEstimate) -> LayerEstimate:
    plain = _both(attention.plain, mlp.plain)
    recomputed = None
    if attention.recomputed is not None:
        recomputed = _both(attention.recomputed, mlp.recomputed or mlp.plain)
        if config.recompute == "full":
            # The input of the second half is made again with the rest.
            kept = totals(each for each in _tensors(config, attention_tensors) if each.is_input).after_forward
            recomputed = replace(recomputed, after_forward=kept, workspace=_whole_again(plain, kept))
    return LayerEstimate(
        name="block",
        flops=attention.flops + mlp.flops,
        plain=plain,
        recomputed=recomputed,
        parameters=attention.parameters + mlp.parameters,
        static=attention.static + mlp.static,
        output_bytes=mlp.output_bytes,
        repeat=config.model.layers,
    )


def _both(first: Running, second: Running) -> Running:
    return Running(
        first.times + second.times,
        first.after_forward + second.after_forward,
        first.after_input + second.after_input,
        max(first.workspace, second.workspace),
    )


def _attention(config: EstimateConfig) -> LayerEstimate:
    model, degree = config.model, config.parallel.tensor_parallel
    shapes, tensors = _shapes(config), _tensors(config, attention_tensors)
    flops = attention_flops(model) / degree
    # I has most on top when it has made its gradients and released nothing: of the residual stream, of the
    # heads' output, and of queries, keys and values. Of plain attention at most: these once more, and scores.
    made = shapes.whole + shapes.query + shapes.query + 2 * shapes.kv
    if model.attention == "plain":
        made += shapes.query + 2 * shapes.kv + 2 * shapes.scores
    # B makes weights' gradients beside: of the projection back while all that F kept is still there, of the
    # first one when queries, keys and values (whose gradients are as large) and the other's input are gone.
    back = shapes.whole + shapes.query + _weight(model, model.query_width * model.hidden // degree)
    into = _weight(model, (model.query_width + 2 * model.kv_width) * model.hidden // degree)
    into += shapes.whole + shapes.hidden - shapes.query
    plain = Running(
        _times(config, flops, traffic.attention_traffic(model, shapes), _half_collectives(config)),
        *_held(tensors),
        workspace=max(made, back, into),
    )
    if config.recompute == "selective":
        recomputed: Running | None = _without_scores(config, plain, tensors)
    else:
        recomputed = _fully_recomputed(config, plain, tensors)
    return _layer(config, "attention", flops, plain, recomputed, attention_parameters(model))


def _mlp(config: EstimateConfig) -> LayerEstimate:
    model, degree = config.model, config.parallel.tensor_parallel
    shapes, tensors = _shapes(config), _tensors(config, mlp_tensors)
    flops = mlp_flops(model) / degree
    # As above: of the residual stream, the last matrix's input and the activation's.
    made = shapes.whole + (3 if model.gated else 2) * shapes.ffn
    # B makes weights' gradients beside: of the last matrix while all that F kept is still there, of the first
    # when the inputs of the activation (whose gradients are as large) and of the last matrix are gone.
    gone = (2 if model.gated and not model.fused_activation else 1) * shapes.ffn
    into = _weight(model, model.hidden * (2 if model.gated else 1) * model.ffn_width // degree)
    into += shapes.whole + shapes.hidden - gone
    back = shapes.whole + shapes.ffn + _weight(model, model.hidden * model.ffn_width // degree)
    plain = Running(
        _times(config, flops, traffic.mlp_traffic(model, shapes), _half_collectives(config)),
        *_held(tensors),
        workspace=max(made, back, into),
    )
    recomputed = _fully_recomputed(config, plain, tensors)
    return _layer(config, "mlp", flops, plain, recomputed, mlp_parameters(model))


def _embedding(config: EstimateConfig) -> LayerEstimate:
    model, parallel = config.model, config.parallel
    shapes, tensors = _shapes(config), _tensors(config, embedding_tensors)
    moved = traffic.embedding_traffic(model, shapes, parallel.tensor_parallel, config.precision.gradients)
    collectives = times.embedding_collectives(parallel.sequence_parallel)
    nothing = Flops(0.0, 0.0, 0.0)
    # F makes rows for tokens and positions, then their sum; B a gradient of the whole table, which it adds.
    rows = shapes.whole + (shapes.positions + shapes.whole if model.positions == "learned" else 0)
    table = shapes.whole + _weight(model, model.vocabulary * model.hidden // parallel.tensor_parallel)
    plain = Running(_times(config, nothing, moved, collectives), *_held(tensors), workspace=max(rows, table))
    return _layer(config, "embedding", nothing, plain, None, embedding_parameters(model))


def _head(config: EstimateConfig) -> LayerEstimate:
    model, parallel = config.model, config.parallel
    shapes, tensors = _shapes(config), _tensors(config, head_tensors)
    flops = head_flops(model) / parallel.tensor_parallel
    # Beside what the loss keeps, I makes two tensors as large in float32: the gradients behind and before the
    # logarithm of the softmax. Where the vocabulary is small, those around the norm are larger, and where the
    # tokens are few, the weight's gradient in B, with that of its input, once the logits' loss is gone.
    in_float32 = shapes.logits // model.dtype_bytes * STATISTIC_BYTES
    table = _weight(model, model.vocabulary * model.hidden // parallel.tensor_parallel)
    plain = Running(
        _times(
            config,
            flops,
            traffic.head_traffic(model, shapes),
            times.head_collectives(parallel.sequence_parallel),
        ),
        *_held(tensors),
        workspace=max(2 * in_float32, 2 * shapes.whole, table + shapes.whole + shapes.logits - in_float32),
    )
    count = head_parameters(model)
    if model.tied_embeddings and config.placement != "v":
        # Off the embedding's rank the head needs a copy, with all that training keeps of it.
        count += Parameters(shared=model.vocabulary * model.hidden, replicated=0)
    layer = _layer(config, "head", flops, plain, None, count)
    return replace(layer, output_bytes=0)


def _layer(
    config: EstimateConfig,
    name: str,
    flops: Flops,
    plain: Running,
    recomputed: Running | None,
    parameters: Parameters,
) -> LayerEstimate:
    parallel = config.parallel
    count = parameters.on_device(parallel.tensor_parallel)
    kept = static_bytes(
        count, config.precision, config.optimizer_states, parallel.zero_stage, parallel.data_parallel
    )
    return LayerEstimate(
        name=name,
        flops=flops,
        plain=plain,
        recomputed=recomputed,
        parameters=count,
        # A replica's share of a layer is rounded up: shards are padded to one size.
        static=StaticBytes(*map(math.ceil, (kept.parameters, kept.gradients, kept.optimizer))),
        output_bytes=_shapes(config).hidden,
    )


def _without_scores(config: EstimateConfig, plain: Running, tensors: list[Held]) -> Running:
    """Selective recomputation: scores exist during I only (Korthikanti et al. 2022, §5)."""
    flops = core_flops(config.model) / config.parallel.tensor_parallel
    moved = traffic.core_traffic(config.model, _shapes(config))
    again = _times(config, flops, moved, times.Collectives()).forward
    dropped = totals(each for each in tensors if each.is_core).after_forward
    return replace(
        plain,
        times=plain.times + Triple(backward_input=again),
        after_forward=plain.after_forward - dropped,
        workspace=plain.workspace + dropped,
    )


def _fully_recomputed(config: EstimateConfig, plain: Running, tensors: list[Held]) -> Running | None:
    """Full recomputation: F keeps only the input, and I begins with an F (Chen et al. 2016, §3)."""
    if config.recompute != "full":
        return None
    kept = totals(each for each in tensors if each.is_input).after_forward
    again = replace(plain, times=plain.times + Triple(backward_input=plain.times.forward))
    return replace(again, after_forward=kept, workspace=_whole_again(plain, kept))


def _whole_again(plain: Running, kept: int) -> int:
    """Workspace of a recomputed layer: the outputs of F, except the input, exist during its backward only."""
    return plain.workspace + plain.after_forward - kept


def _times(config: EstimateConfig, flops: Flops, moved: Triple, collectives: times.Collectives) -> Triple:
    return (
        times.product_times(flops, config.device)
        + times.traffic_times(moved, config.device)
        + times.collective_times(collectives, config)
    )


def _tensors(config: EstimateConfig, of: Callable[[ModelConfig, int, bool], list[Held]]) -> list[Held]:
    parallel = config.parallel
    return of(config.model, parallel.tensor_parallel, parallel.sequence_parallel)


def _held(tensors: list[Held]) -> tuple[int, int]:
    held = totals(tensors)
    return held.after_forward, held.after_input


def _shapes(config: EstimateConfig) -> Shapes:
    parallel = config.parallel
    return Shapes.of(config.model, parallel.tensor_parallel, parallel.sequence_parallel)


def _half_collectives(config: EstimateConfig) -> times.Collectives:
    return times.half_collectives(config.parallel.sequence_parallel)


def _weight(model: ModelConfig, size: int) -> int:
    """Size of a weight's gradient, which B computes before it is accumulated."""
    return model.dtype_bytes * size
