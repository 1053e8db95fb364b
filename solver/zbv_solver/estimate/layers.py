"""Costs and memory of a model's layers on one device.

A block consists of two halves, attention and MLP. Its figures are the sums of theirs, except for the
workspace, which is the larger one, because a device runs one action at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zbv_solver.estimate import times, traffic
from zbv_solver.estimate.activations import (
    STATISTIC_BYTES,
    Held,
    Shapes,
    after_forward,
    after_input,
    attention_tensors,
    embedding_tensors,
    head_tensors,
    mlp_tensors,
)
from zbv_solver.estimate.amounts import PerAction
from zbv_solver.estimate.config import EstimateConfig
from zbv_solver.estimate.flops import attention_flops, core_flops, head_flops, mlp_flops
from zbv_solver.estimate.parameters import (
    Parameters,
    StaticBytes,
    attention_parameters,
    embedding_parameters,
    head_parameters,
    mlp_parameters,
    static_bytes,
)


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

    times: PerAction
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
    flops: PerAction
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
            # The input of the second half is computed again with the rest.
            kept = _input_bytes(attention_tensors(_shapes(config)))
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
    shapes = _shapes(config)
    tensors = attention_tensors(shapes)
    layer = _layer(
        config,
        "attention",
        tensors,
        attention_flops(config.model),
        traffic.attention_traffic(shapes),
        times.half_collectives(shapes.sequence_parallel),
        _attention_workspace(shapes),
        attention_parameters(config.model),
    )
    return replace(layer, recomputed=_recomputed(config, layer.plain, tensors))


def _attention_workspace(shapes: Shapes) -> int:
    model = shapes.model
    # I holds most when it has computed its gradients and released nothing: the gradients of the residual
    # stream, of the heads' output, and of queries, keys and values. With plain attention, the last three
    # exist twice for a moment, together with the scores and their gradient.
    projected = shapes.query + 2 * shapes.kv
    gradients = shapes.whole + shapes.query + projected
    if model.attention == "plain":
        gradients += projected + 2 * shapes.scores
    # B also computes the gradients of weights. For the projection back, everything that F kept is still
    # there. For the first projection, queries, keys and values (whose gradients are as large) and the input
    # of the projection back are released.
    back = shapes.whole + shapes.query + shapes.weight(model.query_width, model.hidden)
    first = shapes.weight(model.hidden, model.query_width + 2 * model.kv_width)
    first += shapes.whole + shapes.hidden - shapes.query
    return max(gradients, back, first)


def _mlp(config: EstimateConfig) -> LayerEstimate:
    shapes = _shapes(config)
    tensors = mlp_tensors(shapes)
    layer = _layer(
        config,
        "mlp",
        tensors,
        mlp_flops(config.model),
        traffic.mlp_traffic(shapes),
        times.half_collectives(shapes.sequence_parallel),
        _mlp_workspace(shapes),
        mlp_parameters(config.model),
    )
    return replace(layer, recomputed=_recomputed(config, layer.plain, tensors))


def _mlp_workspace(shapes: Shapes) -> int:
    model, inputs = shapes.model, 2 if shapes.model.gated else 1
    # I: the gradients of the residual stream, of the last matrix's input, and of the activation's inputs.
    gradients = shapes.whole + (1 + inputs) * shapes.ffn
    # B also computes the gradients of weights. For the last matrix, everything that F kept is still there.
    # For the first one, the activation's inputs (whose gradients are as large) and the input of the last
    # matrix are released.
    last = shapes.whole + shapes.ffn + shapes.weight(model.ffn_width, model.hidden)
    released = (2 if model.gated and not model.fused_activation else 1) * shapes.ffn
    first = shapes.weight(model.hidden, inputs * model.ffn_width) + shapes.whole + shapes.hidden - released
    return max(gradients, last, first)


def _embedding(config: EstimateConfig) -> LayerEstimate:
    model, shapes = config.model, _shapes(config)
    # F computes rows for tokens and positions, then their sum. B computes a gradient of the whole table.
    rows = shapes.whole + (shapes.positions + shapes.whole if model.positions == "learned" else 0)
    table = shapes.whole + shapes.weight(model.vocabulary, model.hidden)
    return _layer(
        config,
        "embedding",
        embedding_tensors(shapes),
        PerAction(),
        traffic.embedding_traffic(shapes, config.precision.gradients),
        times.embedding_collectives(shapes.sequence_parallel),
        max(rows, table),
        embedding_parameters(model),
    )


def _head(config: EstimateConfig) -> LayerEstimate:
    model, shapes = config.model, _shapes(config)
    # In addition to the tensors that the loss keeps, I computes two of the same size in float32: the
    # gradients after and before the logarithm of the softmax. With a small vocabulary, the two around the
    # norm are larger. With few tokens, B needs most: for the gradients of the weight and of its input, after
    # the logits of the loss are released.
    in_float32 = shapes.logits // model.dtype_bytes * STATISTIC_BYTES
    table = shapes.weight(model.vocabulary, model.hidden)
    parameters = head_parameters(model)
    if model.tied_embeddings and config.placement != "v":
        # The embedding is on another rank, so the head needs a copy, with all that training keeps of it.
        parameters += Parameters(shared=model.vocabulary * model.hidden, replicated=0)
    layer = _layer(
        config,
        "head",
        head_tensors(shapes),
        head_flops(model),
        traffic.head_traffic(shapes),
        times.head_collectives(shapes.sequence_parallel),
        max(2 * in_float32, 2 * shapes.whole, table + shapes.whole + shapes.logits - in_float32),
        parameters,
    )
    return replace(layer, output_bytes=0)


def _layer(
    config: EstimateConfig,
    name: str,
    tensors: Sequence[Held],
    flops: PerAction,
    moved: PerAction,
    collectives: times.Collectives,
    workspace: int,
    parameters: Parameters,
) -> LayerEstimate:
    """A layer without recomputation; ``flops`` and ``parameters`` are those of the tensor-parallel group."""
    parallel, device = config.parallel, config.device
    on_device = flops / parallel.tensor_parallel
    compute = times.product_times(on_device, device) + times.traffic_times(moved, device)
    plain = Running(
        compute + times.collective_times(collectives, config),
        after_forward(tensors),
        after_input(tensors),
        workspace,
    )
    count = parameters.on_device(parallel.tensor_parallel)
    kept = static_bytes(
        count, config.precision, config.optimizer_states, parallel.zero_stage, parallel.data_parallel
    )
    return LayerEstimate(
        name=name,
        flops=on_device,
        plain=plain,
        recomputed=None,
        parameters=count,
        # A replica's share of a layer is rounded up: shards are padded to one size.
        static=StaticBytes(*map(math.ceil, (kept.parameters, kept.gradients, kept.optimizer))),
        output_bytes=_shapes(config).hidden,
    )


def _recomputed(config: EstimateConfig, plain: Running, tensors: Sequence[Held]) -> Running | None:
    """The costs of half a block if its stage is recomputed; None if the half offers no recomputation."""
    if config.recompute == "full":
        # F keeps only the input, and I begins with an F (Chen et al. 2016, §3).
        kept = _input_bytes(tensors)
        twice = plain.times + PerAction(backward_input=plain.times.forward)
        return Running(twice, kept, plain.after_input, _whole_again(plain, kept))
    scores = after_forward(tensor for tensor in tensors if tensor.is_core)
    if config.recompute == "none" or not scores:
        return None
    # Selective recomputation: scores exist during I only (Korthikanti et al. 2022, §5).
    flops = core_flops(config.model) / config.parallel.tensor_parallel
    again = times.product_times(flops, config.device)
    again += times.traffic_times(traffic.core_traffic(_shapes(config)), config.device)
    return Running(
        plain.times + PerAction(backward_input=again.forward),
        plain.after_forward - scores,
        plain.after_input,
        plain.workspace + scores,
    )


def _input_bytes(tensors: Sequence[Held]) -> int:
    return after_forward(tensor for tensor in tensors if tensor.is_input)


def _whole_again(plain: Running, kept: int) -> int:
    """Workspace of a recomputed layer: the outputs of F, except the input, exist during its backward only."""
    return plain.workspace + plain.after_forward - kept


def _shapes(config: EstimateConfig) -> Shapes:
    return Shapes(config.model, config.parallel.tensor_parallel, config.parallel.sequence_parallel)
