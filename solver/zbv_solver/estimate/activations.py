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


def after_forward(tensors: Iterable[Held]) -> int:
    """Bytes that are kept after F."""
    return sum(tensor.bytes for tensor in tensors if tensor.after_forward)


def after_input(tensors: Iterable[Held]) -> int:
    """Bytes that are kept after I."""
    return sum(tensor.bytes for tensor in tensors if tensor.after_input)


@dataclass(frozen=True)
class Shapes:
    """Sizes of a microbatch's tensors on one device of a tensor-parallel group, in bytes."""

    model: ModelConfig
    tensor_parallel: int = 1
    sequence_parallel: bool = False

    @property
    def tokens(self) -> int:
        """Number of tokens for which a device computes norms and dropout."""
        return self.model.tokens // (self.tensor_parallel if self.sequence_parallel else 1)

    @property
    def hidden(self) -> int:
        """A tensor as wide as the residual stream, outside the parts that tensor parallelism divides."""
        return self.model.dtype_bytes * self.tokens * self.model.hidden

    @property
    def whole(self) -> int:
        """The same for all tokens."""
        return self.model.dtype_bytes * self.model.tokens * self.model.hidden

    @property
    def query(self) -> int:
        """The queries."""
        return self._divided(self.model.query_width)

    @property
    def kv(self) -> int:
        """The keys; the values are as large."""
        return self._divided(self.model.kv_width)

    @property
    def ffn(self) -> int:
        """A tensor as wide as the MLP."""
        return self._divided(self.model.ffn_width)

    @property
    def scores(self) -> int:
        """Attention's scores."""
        model = self.model
        heads = model.heads // self.tensor_parallel
        return model.dtype_bytes * heads * model.microbatch_size * model.sequence**2

    @property
    def positions(self) -> int:
        """The added position embeddings: a sequence as wide as the residual stream."""
        return self.model.dtype_bytes * self.model.sequence * self.model.hidden

    @property
    def logits(self) -> int:
        """The logits, in the activations' type."""
        return self._divided(self.model.vocabulary)

    def _divided(self, width: int) -> int:
        return self.model.dtype_bytes * self.model.tokens * width // self.tensor_parallel

    def weight(self, n_in: int, n_out: int) -> int:
        """The gradient of a matrix, which B computes before it is accumulated."""
        return self.model.dtype_bytes * (n_in * n_out // self.tensor_parallel)

    def mask(self, of: int) -> int:
        """The dropout mask of a tensor of the given size."""
        return of // self.model.dtype_bytes * MASK_BYTES


def attention_tensors(shapes: Shapes) -> list[Held]:
    """First half of a block: norm, projections, scores, residual.

    13 s b h + 5 a s² b with dropout in 16 bits (Korthikanti et al. 2022, §4.1). Flash attention keeps the
    normaliser of every row instead of scores (Dao et al. 2022, §3.1).
    """
    model = shapes.model
    held = [
        *_norm(shapes, "attention's norm"),
        Held("input of the projection to queries, keys, values", shapes.hidden, after_input=True),
        _gradient("gradients of queries, keys, values", shapes.query + 2 * shapes.kv),
        Held("queries", shapes.query),
        Held("keys", shapes.kv),
        Held("values", shapes.kv),
        *_scores(shapes),
        Held("input of the projection back", shapes.query, after_input=True),
        _gradient("gradient of the projection back", shapes.whole),
    ]
    if model.qk_norm:
        rows = (model.heads + model.n_kv_heads) // shapes.tensor_parallel * model.tokens
        held.append(Held("queries and keys before their norms", shapes.query + shapes.kv))
        held.append(Held("statistics of their norms", _statistics(model) * rows))
    return held + _dropout(shapes, "attention's dropout mask")


def mlp_tensors(shapes: Shapes) -> list[Held]:
    """Second half of a block: norm, MLP, residual (Korthikanti et al. 2022, §4.1: 21 s b h).

    With a gate the activation reads two tensors; unfused, the activated gate is kept as well.
    """
    model = shapes.model
    into = (2 if model.gated else 1) * shapes.ffn
    held = [
        *_norm(shapes, "MLP's norm"),
        Held("input of the MLP's first matrix", shapes.hidden, after_input=True),
        _gradient("gradient of the MLP's first matrix", into),
        Held("input of the activation", into),
        Held("input of the MLP's last matrix", shapes.ffn, after_input=True),
        _gradient("gradient of the MLP's last matrix", shapes.whole),
    ]
    if model.gated and not model.fused_activation:
        held.append(Held("activated gate", shapes.ffn))
    return held + _dropout(shapes, "MLP's dropout mask")


def embedding_tensors(shapes: Shapes) -> list[Held]:
    """Look-up of tokens and positions. I computes nothing: the gradient that arrives waits for W."""
    model = shapes.model
    held = [
        Held("tokens", INDEX_BYTES * model.tokens, after_input=True, is_input=True),
        _gradient("gradient of the embedding", shapes.whole),
    ]
    if model.positions == "learned":
        held.append(Held("positions", INDEX_BYTES * model.sequence, after_input=True))
        held.append(_gradient("gradient of the positions", shapes.positions))
    return held + _dropout(shapes, "embedding's dropout mask")


def head_tensors(shapes: Shapes) -> list[Held]:
    """Final norm, product with the vocabulary, loss.

    Korthikanti et al. 2022, §4.3: 2 s b h for the norm, 2 s b h for the product, and 4 s b V for logits in
    float32, of which the loss keeps one tensor.
    """
    model = shapes.model
    logits = shapes.logits // model.dtype_bytes
    return [
        *_norm(shapes, "final norm"),
        Held("input of the head", shapes.hidden, after_input=True),
        _gradient("gradient of the logits", shapes.logits),
        Held("logits in the loss", STATISTIC_BYTES * logits),
        Held("targets", INDEX_BYTES * model.tokens),
    ]


def _norm(shapes: Shapes, name: str) -> list[Held]:
    return [
        Held(f"input of {name}", shapes.hidden, is_input=True),
        Held(f"statistics of {name}", _statistics(shapes.model) * shapes.tokens),
    ]


def _statistics(model: ModelConfig) -> int:
    return STATISTIC_BYTES * (2 if model.norm == "layernorm" else 1)


def _scores(shapes: Shapes) -> list[Held]:
    model = shapes.model
    if model.attention == "flash":
        rows = model.heads // shapes.tensor_parallel * model.tokens
        return [Held("softmax normalisers", STATISTIC_BYTES * rows)]
    held = [Held("softmax", shapes.scores, is_core=True)]
    if model.dropout:
        held.append(Held("mask of the softmax", shapes.mask(shapes.scores), is_core=True))
        held.append(Held("softmax after dropout", shapes.scores, is_core=True))
    return held


def _dropout(shapes: Shapes, name: str) -> list[Held]:
    return [Held(name, shapes.mask(shapes.hidden))] if shapes.model.dropout else []


def _gradient(name: str, size: int) -> Held:
    """A gradient that waits for W."""
    return Held(name, size, after_forward=False, after_input=True)
