"""Costs of a gated delta net as given costs (Yang et al. 2024, Gated Delta Networks, arXiv 2412.06464).

The rule is computed in chunks (§3.3; Yang et al. 2024, Parallelizing Linear Transformers with the Delta
Rule, arXiv 2406.06484, §3): inside a chunk the keys' products and the inverse of their triangle, which is
applied to keys and values; scores and outputs; and products with the state before the chunk, and the update
of that state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

STATE_BYTES = 4
"""Size of a value of a state: float32."""


@dataclass(frozen=True)
class DeltaNet:
    """The sizes of a gated delta net.

    Attributes
    ----------
    key_heads, value_heads
        Heads of queries and keys, and of values.
    key_dim, value_dim
        Widths of their heads.
    kernel
        Width of the convolution.
    chunk
        Tokens of a chunk (flash-linear-attention, ``chunk_gated_delta_rule``).
    """

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int = 4
    chunk: int = 64

    def costs(self, dtype_bytes: int = 2) -> dict[str, Any]:
        """The object ``state_space`` of a configuration: parameters, and costs per token."""
        h, keys = self.hidden, self.key_heads * self.key_dim
        heads, values = self.value_heads, self.value_heads * self.value_dim
        convolved, per_head = 2 * keys + values, 2 * heads
        projected = convolved + values + per_head
        inside = 2 * self.chunk * (3 * self.key_dim + 2 * self.value_dim) + self.chunk**2
        states = 3 * 2 * self.key_dim * self.value_dim
        kept_states = STATE_BYTES * heads * self.key_dim * self.value_dim / self.chunk
        return {
            # Two projections; convolution; decay and step of every head; the norms of heads and of the input.
            "parameters": h * (projected + values) + convolved * self.kernel + per_head + self.value_dim + h,
            "flops": 2.0 * h * (projected + values),
            "core_flops": float(heads * (inside + states)),
            # Norm and residual sum; convolution and normalised keys; the norm of the gated output.
            "memory_traffic": float(dtype_bytes * (5 * h + 6 * convolved + 5 * values)),
            "after_forward": dtype_bytes * (2.0 * h + projected + convolved + 2 * values) + kept_states,
            "after_input": float(dtype_bytes * (2 * h + projected + values)),
        }
