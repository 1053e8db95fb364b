"""The tensors that a microbatch keeps after F and after I, in bytes on one device.

After F these are the tensors that the backward reads (Korthikanti et al. 2022, §4.1, in their order). After I
these are the tensors that the queued weight gradients read: the input of every linear layer and the gradient
of its output (Qi et al. 2023, §2.3: 32 s b h for a GPT block). Norms compute the gradients of their weights
in I.

Tensors that a tensor-parallel group divides are t times smaller. The others are whole, unless sequence
parallelism divides them, too (Korthikanti et al. 2022, §4.2). The gradient of a sum over the group is always
whole: it is gathered for I and queued in that form.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zbv_solver.estimate.config import ModelConfig

INDEX_BYTES = 8
"""Size of a token index, and of a target."""
STATISTIC_BYTES = 4
"""Size of a norm's mean or deviation, of a softmax normaliser, and of a logit in the loss: float32."""
MASK_BYTES = 1


@dataclass(frozen=True)
class Held:
    """A tensor that is kept.

    Attributes
    ----------
    after_forward, after_input
        Whether it is kept after F, and after I.
    is_core
        Whether selective recomputation drops it: scores and tensors that are computed from them.
    is_input
        Whether it is the layer's input, which full recomputation keeps.
    """

    name: str
    bytes: int
    after_forward: bool = True
    after_input: bool = False
    is_core: bool = False
    is_input: bool = False


@dataclass(frozen=True)
class Activations:
    """Sums over a layer's tensors, in bytes."""

    after_forward: int
    after_input: int


def totals(tensors: Iterable[Held]) -> Activations:
    """What is held after F and after I."""
    held = tuple(tensors)
    return Activations(
        sum(each.bytes for each in held if each.after_forward),
        sum(each.bytes for each in held if each.after_input),
    )


@dataclass(frozen=True)
class Shapes:
    """Sizes of a microbatch's tensors on one device, in bytes unless said otherwise.

    Attributes
    ----------
    tokens
        Number of tokens for which a device computes norms and dropout.
    hidden
        A tensor as wide as the residual stream, outside the parts that tensor parallelism divides.
    whole
        The same for all tokens.
    query, kv, ffn
        Queries; keys (or values); one tensor as wide as the MLP.
    scores
        Attention's scores.
    positions
        The added position embeddings: a sequence as wide as the residual stream.
    logits
        Logits in the activations' type.
    """

    tokens: int
    hidden: int
    whole: int
    query: int
    kv: int
    ffn: int
    scores: int
    positions: int
    logits: int

    @classmethod
    def of(cls, model: ModelConfig, tensor_parallel: int = 1, sequence_parallel: bool = False) -> Shapes:
        """Those of a model on each device of a tensor-parallel group."""
        t, value = tensor_parallel, model.dtype_bytes
        tokens = model.tokens // t if sequence_parallel else model.tokens
        scores = model.heads // t * model.microbatch_size * model.sequence**2
        return cls(
            tokens=tokens,
            hidden=value * tokens * model.hidden,
            whole=value * model.tokens * model.hidden,
            query=value * model.tokens * model.query_width // t,
            kv=value * model.tokens * model.kv_width // t,
            ffn=value * model.tokens * model.ffn_width // t,
            scores=value * scores,
            positions=value * model.sequence * model.hidden,
            logits=value * model.tokens * model.vocabulary // t,
        )

    def mask(self, model: ModelConfig, of: int) -> int:
        """Size of the dropout mask of a tensor of the given size."""
        return of // model.dtype_bytes * MASK_BYTES


def attention_tensors(model: ModelConfig, tensor_parallel: int, sequence_parallel: bool) -> list[Held]:
    """First half of a block: norm, projections, scores, residual.

    13 s b h + 5 a s² b with dropout in 16 bits (Korthikanti et al. 2022, §4.1). Flash attention keeps the
    normaliser of every row instead of scores (Dao et al. 2022, §3.1).
    """
    shapes = Shapes.of(model, tensor_parallel, sequence_parallel)
    held = [
        *_norm(model, shapes, "attention's norm"),
        Held("input of the projection to queries, keys, values", shapes.hidden, after_input=True),
        Held(
            "gradients of queries, keys, values",
            shapes.query + 2 * shapes.kv,
            after_forward=False,
            after_input=True,
        ),
        Held("queries", shapes.query),
        Held("keys", shapes.kv),
        Held("values", shapes.kv),
        *_scores(model, shapes, tensor_parallel),
        Held("input of the projection back", shapes.query, after_input=True),
        Held("gradient of the projection back", shapes.whole, after_forward=False, after_input=True),
    ]
    if model.qk_norm:
        rows = (model.heads + model.n_kv_heads) // tensor_parallel * model.tokens
        held.append(Held("queries and keys before their norms", shapes.query + shapes.kv))
        held.append(Held("statistics of their norms", _statistics(model) * rows))
    return held + _dropout(model, shapes, "attention's dropout mask")


def mlp_tensors(model: ModelConfig, tensor_parallel: int, sequence_parallel: bool) -> list[Held]:
    """Second half of a block: norm, MLP, residual (Korthikanti et al. 2022, §4.1: 21 s b h).

    With a gate the activation reads two tensors; unfused, the activated gate is kept as well.
    """
    shapes = Shapes.of(model, tensor_parallel, sequence_parallel)
    into = (2 if model.gated else 1) * shapes.ffn
    held = [
        *_norm(model, shapes, "MLP's norm"),
        Held("input of the MLP's first matrix", shapes.hidden, after_input=True),
        Held("gradient of the MLP's first matrix", into, after_forward=False, after_input=True),
        Held("input of the activation", into),
        Held("input of the MLP's last matrix", shapes.ffn, after_input=True),
        Held("gradient of the MLP's last matrix", shapes.whole, after_forward=False, after_input=True),
    ]
    if model.gated and not model.fused_activation:
        held.append(Held("activated gate", shapes.ffn))
    return held + _dropout(model, shapes, "MLP's dropout mask")


def embedding_tensors(model: ModelConfig, tensor_parallel: int, sequence_parallel: bool) -> list[Held]:
    """Look-up of tokens and positions. I computes nothing: the gradient that arrives waits for W."""
    shapes = Shapes.of(model, tensor_parallel, sequence_parallel)
    held = [
        Held("tokens", INDEX_BYTES * model.tokens, after_input=True, is_input=True),
        Held("gradient of the embedding", shapes.whole, after_forward=False, after_input=True),
    ]
    if model.positions == "learned":
        held.append(Held("positions", INDEX_BYTES * model.sequence, after_input=True))
        held.append(
            Held("gradient of the positions", shapes.positions, after_forward=False, after_input=True)
        )
    return held + _dropout(model, shapes, "embedding's dropout mask")


def head_tensors(model: ModelConfig, tensor_parallel: int, sequence_parallel: bool) -> list[Held]:
    """Final norm, product with the vocabulary, loss.

    Korthikanti et al. 2022, §4.3: 2 s b h for the norm, 2 s b h for the product, and 4 s b V for logits in
    float32, of which the loss keeps one tensor.
    """
    shapes = Shapes.of(model, tensor_parallel, sequence_parallel)
    logits = shapes.logits // model.dtype_bytes
    return [
        *_norm(model, shapes, "final norm"),
        Held("input of the head", shapes.hidden, after_input=True),
        Held("gradient of the logits", shapes.logits, after_forward=False, after_input=True),
        Held("logits in the loss", STATISTIC_BYTES * logits),
        Held("targets", INDEX_BYTES * model.tokens),
    ]


def block_activation_bytes(
    model: ModelConfig, *, tensor_parallel: int = 1, sequence_parallel: bool = False
) -> Activations:
    """Memory that one microbatch keeps for one transformer block, in bytes on one device.

    For a GPT with plain attention and dropout in 16 bits: s b h (34 + 5 a s / h) after F (Korthikanti et al.
    2022, equation 1) and 32 s b h after I (Qi et al. 2023, table 1), plus statistics of two norms.
    """
    parts = (attention_tensors, mlp_tensors)
    return totals(tensor for part in parts for tensor in part(model, tensor_parallel, sequence_parallel))


def _norm(model: ModelConfig, shapes: Shapes, name: str) -> list[Held]:
    return [
        Held(f"input of {name}", shapes.hidden, is_input=True),
        Held(f"statistics of {name}", _statistics(model) * shapes.tokens),
    ]


def _statistics(model: ModelConfig) -> int:
    return STATISTIC_BYTES * (2 if model.norm == "layernorm" else 1)


def _scores(model: ModelConfig, shapes: Shapes, tensor_parallel: int) -> list[Held]:
    if model.attention == "flash":
        rows = model.heads // tensor_parallel * model.tokens
        return [Held("softmax normalisers", STATISTIC_BYTES * rows)]
    held = [Held("softmax", shapes.scores, is_core=True)]
    if model.dropout:
        held.append(Held("mask of the softmax", shapes.mask(model, shapes.scores), is_core=True))
        held.append(Held("softmax after dropout", shapes.scores, is_core=True))
    return held


def _dropout(model: ModelConfig, shapes: Shapes, name: str) -> list[Held]:
    return [Held(name, shapes.mask(model, shapes.hidden))] if model.dropout else []
