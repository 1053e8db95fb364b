"""Memory traffic of F, I and W of a layer in bytes, without matrix products.

Norms, softmax, dropout, activations and residual sums are bound by memory, not by arithmetic (Ivanov et al.
2021, §4): each reads its inputs and writes its outputs once.
"""

from __future__ import annotations

from zbv_solver.estimate.activations import STATISTIC_BYTES, Shapes
from zbv_solver.estimate.amounts import PerAction


def attention_traffic(shapes: Shapes) -> PerAction:
    """Norm, residual sum and dropout; rotary positions and norms of queries and keys; plain scores."""
    model = shapes.model
    rotated = shapes.query + shapes.kv
    moved = _around(shapes) + core_traffic(shapes)
    if model.positions == "rotary":
        moved += PerAction(2 * rotated, 2 * rotated)
    if model.qk_norm:
        moved += PerAction(2 * rotated, 3 * rotated)
    return moved


def core_traffic(shapes: Shapes) -> PerAction:
    """Softmax of plain scores, and its dropout. Flash attention keeps scores on chip."""
    if shapes.model.attention == "flash":
        return PerAction()
    return PerAction(2 * shapes.scores, 3 * shapes.scores) + _dropout_traffic(shapes, shapes.scores)


def mlp_traffic(shapes: Shapes) -> PerAction:
    """Norm, residual sum, dropout, and the activation."""
    model = shapes.model
    into = (2 if model.gated else 1) * shapes.ffn
    moved = _around(shapes) + PerAction(into + shapes.ffn, 2 * into + shapes.ffn)
    if model.gated and not model.fused_activation:
        moved += PerAction(2 * shapes.ffn, 2 * shapes.ffn)
    return moved


def embedding_traffic(shapes: Shapes, gradient_bytes: float) -> PerAction:
    """Rows are copied in F. In W a gradient as large as the table is zeroed, filled and added."""
    model = shapes.model
    table = model.vocabulary * model.hidden / shapes.tensor_parallel
    added = table * (2 * model.dtype_bytes + 2 * gradient_bytes)
    forward = 2 * shapes.whole + (2 * shapes.hidden if model.positions == "learned" else 0)
    return PerAction(forward, 0.0, 2 * shapes.whole + added) + _dropout_traffic(shapes, shapes.hidden)


def head_traffic(shapes: Shapes) -> PerAction:
    """Norm, and the loss: logits are read twice (maximum and sum) and written in float32; their gradient."""
    in_float32 = shapes.logits / shapes.model.dtype_bytes * STATISTIC_BYTES
    loss = PerAction(2 * shapes.logits + in_float32, in_float32 + shapes.logits)
    return PerAction(2 * shapes.hidden, 3 * shapes.hidden) + loss


def _around(shapes: Shapes) -> PerAction:
    """A norm before, a dropout and a residual sum after: read and written once each."""
    norm = PerAction(2 * shapes.hidden, 3 * shapes.hidden)
    residual = PerAction(3 * shapes.hidden, 3 * shapes.hidden)
    return norm + residual + _dropout_traffic(shapes, shapes.hidden)


def _dropout_traffic(shapes: Shapes, of: int) -> PerAction:
    if not shapes.model.dropout:
        return PerAction()
    moved = 2 * of + shapes.mask(of)
    return PerAction(moved, moved)
