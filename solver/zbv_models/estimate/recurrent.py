"""Costs per token of layers without attention: state spaces, linear attention, delta rules, convolutions.

Each is a first half of a block: a norm, products of its input, a convolution over neighbours, a recurrence
that is computed in chunks of tokens, a gate, and a product back. :meth:`costs` of a class is the object
``state_space`` of a configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

STATE_BYTES = 4
"""Size of a value of a state: float32."""
DTYPE_BYTES = 2
"""Size of an activation."""


def _costs(
    hidden: int,
    projected: int,
    inner: int,
    convolved: int,
    *,
    others: int,
    core: float,
    states: float = 0.0,
    low_rank: int = 0,
    passes: int = 6,
) -> dict[str, Any]:
    """The costs of a layer.

    Parameters
    ----------
    projected, inner
        Widths of the products of the input, and of what is projected back.
    convolved
        Width of what is convolved; ``passes`` times it is the memory traffic of that and of its inputs.
    others
        Parameters besides the matrices and the norm of the input.
    core
        Operations of the recurrence.
    states
        Values of a state per token of a chunk.
    low_rank
        Parameters of products between those, which have as many operations each as parameters, times two.
    """
    e, matrices = DTYPE_BYTES, hidden * (projected + inner) + low_rank
    return {
        "parameters": matrices + others + hidden,
        "flops": 2.0 * matrices,
        "core_flops": float(core),
        # Norm and residual sum; convolution and recurrence; the norm or gate of the output.
        "memory_traffic": float(e * (5 * hidden + passes * convolved + 5 * inner)),
        "after_forward": e * (2.0 * hidden + projected + convolved + 2 * inner) + STATE_BYTES * states,
        "after_input": float(e * (2 * hidden + projected + inner)),
    }


@dataclass(frozen=True)
class Mamba:
    """The sizes of a Mamba-2 layer (Dao and Gu 2024, Transformers are SSMs, arXiv 2405.21060).

    The scan is computed in chunks (§6 and listing 1): scores and outputs inside a chunk, the state at the
    end of each chunk, and outputs from the state before it.
    """

    hidden: int
    heads: int
    inner: int
    """Width of all heads."""
    state: int
    groups: int
    """Width of a state, and groups of heads that share its input and output projections."""
    kernel: int = 4
    """Width of the convolution."""
    chunk: int = 128
    """Tokens of a chunk."""

    def costs(self) -> dict[str, Any]:
        """Parameters, and costs per token."""
        convolved = self.inner + 2 * self.groups * self.state
        inside = 2 * self.chunk * (self.groups * self.state + self.inner)
        return _costs(
            self.hidden,
            self.inner + convolved + self.heads,
            self.inner,
            convolved,
            # Convolution with its bias; decay, step and skip of every head; the norm of the gated output.
            others=convolved * (self.kernel + 1) + 3 * self.heads + self.inner,
            core=inside + 4 * self.state * self.inner,
            states=self.inner * self.state / self.chunk,
            passes=4,
        )


@dataclass(frozen=True)
class SelectiveScan:
    """The sizes of a Mamba layer as in Jamba (Gu and Dao 2023, Mamba, arXiv 2312.00752, §3.2 and §3.4).

    Every channel has its own state, with a step from a low-rank product; the scan keeps no states, but
    computes them again in I (§3.3.2). Jamba has norms of step, input and output projections (Lieber et al.
    2024, §2).
    """

    hidden: int
    inner: int
    state: int
    rank: int
    """Rank of the step."""
    kernel: int = 4

    def costs(self) -> dict[str, Any]:
        """Parameters, and costs per token; the scan has 6 operations per channel and value of its state."""
        inner, state, rank = self.inner, self.state, self.rank
        return _costs(
            self.hidden,
            2 * inner,
            inner,
            inner,
            # Convolution, bias of the step, states and skip; norms.
            others=inner * (self.kernel + 1) + inner + inner * (state + 1) + rank + 2 * state,
            core=6 * inner * state,
            low_rank=inner * (rank + 2 * state) + rank * inner,
        )


def _delta_rule(heads: int, key: int, value: int, chunk: int) -> tuple[float, float]:
    """Operations of the chunked delta rule, and values of states, per token.

    Yang et al. 2024, Parallelizing Linear Transformers with the Delta Rule, arXiv 2406.06484, §3: inside a
    chunk the keys' products and the inverse of their triangle, which is applied to keys and values; scores
    and outputs; and products with the state before the chunk, and the update of that state.
    """
    inside = 2 * chunk * (3 * key + 2 * value) + chunk**2
    return float(heads * (inside + 3 * 2 * key * value)), heads * key * value / chunk


@dataclass(frozen=True)
class DeltaNet:
    """The sizes of a gated delta net (Yang et al. 2024, Gated Delta Networks, arXiv 2412.06464, §3.3)."""

    hidden: int
    key_heads: int
    value_heads: int
    """Heads of queries and keys, and of values."""
    key_dim: int
    value_dim: int
    """Widths of their heads."""
    kernel: int = 4
    """Width of the convolution."""
    chunk: int = 64
    """Tokens of a chunk (flash-linear-attention, ``chunk_gated_delta_rule``)."""

    def costs(self) -> dict[str, Any]:
        """Parameters, and costs per token."""
        heads, values = self.value_heads, self.value_heads * self.value_dim
        convolved, per_head = 2 * self.key_heads * self.key_dim + values, 2 * heads
        core, states = _delta_rule(heads, self.key_dim, self.value_dim, self.chunk)
        return _costs(
            self.hidden,
            convolved + values + per_head,
            values,
            convolved,
            # Convolution; decay and step of every head; the norm of a head's output.
            others=convolved * self.kernel + per_head + self.value_dim,
            core=core,
            states=states,
        )


@dataclass(frozen=True)
class KimiDelta:
    """The sizes of Kimi Delta Attention (Kimi Team 2025, Kimi Linear, arXiv 2510.26692, §3).

    A gated delta net whose decay has a value per channel, from a low-rank product, as has its output gate.
    """

    hidden: int
    heads: int
    dim: int
    kernel: int = 4
    chunk: int = 64
    full_gates: int = 0
    """Of decay and gate, those that a product of the input gives, instead of a low-rank one."""

    def costs(self) -> dict[str, Any]:
        """Parameters, and costs per token."""
        width, low = self.heads * self.dim, (2 - self.full_gates) * self.dim
        core, states = _delta_rule(self.heads, self.dim, self.dim, self.chunk)
        return _costs(
            self.hidden,
            (3 + self.full_gates) * width + self.heads + low,
            width,
            3 * width,
            # Convolution; bias of the decay, and its rate per head; the norm of a head's output.
            others=3 * width * self.kernel + width + self.heads + self.dim,
            core=core,
            states=states,
            low_rank=low * width,
        )


@dataclass(frozen=True)
class LightningAttention:
    """The sizes of lightning attention (Qin et al. 2024, arXiv 2405.17381, §3; MiniMax-01, 2025, §2.2.1).

    Linear attention in blocks: scores and outputs inside a block, the state of keys and values before it,
    and its update. A gate and a norm of all heads follow.
    """

    hidden: int
    heads: int
    dim: int
    block: int = 256
    """Tokens of a block."""

    def costs(self) -> dict[str, Any]:
        """Parameters, and costs per token."""
        width = self.heads * self.dim
        return _costs(
            self.hidden,
            4 * width,
            width,
            3 * width,
            others=width,
            core=width * (4 * self.block + 4 * self.dim),
            states=width * self.dim / self.block,
        )


@dataclass(frozen=True)
class ShortConvolution:
    """The sizes of a gated short convolution (Liquid AI 2025, LFM2, arXiv 2511.23404, §2)."""

    hidden: int
    kernel: int
    bias: bool = False

    def costs(self) -> dict[str, Any]:
        """Parameters, and costs per token."""
        h = self.hidden
        others = h * self.kernel + (5 * h if self.bias else 0)
        return _costs(h, 3 * h, h, h, others=others, core=2 * self.kernel * h)


def linear_map(hidden: int) -> dict[str, Any]:
    """Costs of a square matrix instead of half a block (Bercovich et al. 2024, arXiv 2411.19146, §3)."""
    return _costs(hidden, 0, hidden, 0, others=0, core=0.0)
