"""Memory traffic of F, I and W of a layer in bytes, without matrix products.

Norms, softmax, dropout, activations and residual sums are bound by memory, not by arithmetic (Ivanov et al.
2021, §4): each reads its inputs and writes its outputs once.
"""

from __future__ import annotations

from zbv_solver.estimate.activations import MASK_BYTES, STATISTIC_BYTES, Shapes
from zbv_solver.estimate.config import ModelConfig
from zbv_solver.estimate.times import Triple


def attention_traffic(model: ModelConfig, shapes: Shapes) -> Triple:
    """Norm, residual sum and dropout; rotary positions and norms of queries and keys; plain scores."""
    rotated = shapes.query + shapes.kv
    moved = _around(model, shapes) + core_traffic(model, shapes)
    if model.positions == "rotary":
        moved += Triple(2 * rotated, 2 * rotated)
    if model.qk_norm:
        moved += Triple(2 * rotated, 3 * rotated)
    return moved


def core_traffic(model: ModelConfig, shapes: Shapes) -> Triple:
    """Softmax of plain scores, and its dropout. Flash attention keeps scores on chip."""
    if model.attention == "flash":
        return Triple()
    return Triple(2 * shapes.scores, 3 * shapes.scores) + _dropout_traffic(model, shapes, shapes.scores)


def mlp_traffic(model: ModelConfig, shapes: Shapes) -> Triple:
    """Norm, residual sum, dropout, and the activation."""
    into = (2 if model.gated else 1) * shapes.ffn
    moved = _around(model, shapes) + Triple(into + shapes.ffn, 2 * into + shapes.ffn)
    if model.gated and not model.fused_activation:
        moved += Triple(2 * shapes.ffn, 2 * shapes.ffn)
    return moved


def embedding_traffic(
    model: ModelConfig, shapes: Shapes, tensor_parallel: int, gradient_bytes: float
) -> Triple:
    """Rows are copied in F. In W a gradient as large as the table is zeroed, filled and added."""
    table = model.vocabulary * model.hidden / tensor_parallel
    added = table * (2 * model.dtype_bytes + 2 * gradient_bytes)
    forward = 2 * shapes.whole + (2 * shapes.hidden if model.positions == "learned" else 0)
    return Triple(forward, 0.0, 2 * shapes.whole + added) + _dropout_traffic(model, shapes, shapes.hidden)


def head_traffic(model: ModelConfig, shapes: Shapes) -> Triple:
    """Norm, and the loss: logits are read twice (maximum and sum) and written in float32; their gradient."""
    in_float32 = shapes.logits / model.dtype_bytes * STATISTIC_BYTES
    loss = Triple(2 * shapes.logits + in_float32, in_float32 + shapes.logits)
    return Triple(2 * shapes.hidden, 3 * shapes.hidden) + loss


def _around(model: ModelConfig, shapes: Shapes) -> Triple:
    """A norm before, a dropout and a residual sum after: read and written once each."""
    norm = Triple(2 * shapes.hidden, 3 * shapes.hidden)
    residual = Triple(3 * shapes.hidden, 3 * shapes.hidden)
    return norm + residual + _dropout_traffic(model, shapes, shapes.hidden)


def _dropout_traffic(model: ModelConfig, shapes: Shapes, of: int) -> Triple:
    if not model.dropout:
        return Triple()
    moved = 2 * of + of // model.dtype_bytes * MASK_BYTES
    return Triple(moved, moved)
