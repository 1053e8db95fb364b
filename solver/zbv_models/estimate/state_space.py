"""Costs of a Mamba-2 layer as given costs (Dao and Gu 2024, Transformers are SSMs, arXiv 2405.21060).

The scan is computed in chunks (§6 and listing 1): scores and outputs inside a chunk, the state at the end of
each chunk, and outputs from the state before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

STATE_BYTES = 4
"""Size of a value of a state: float32."""


@dataclass(frozen=True)
class Mamba:
    """The sizes of a Mamba-2 layer.

    Attributes
    ----------
    inner
        Width of all heads.
    state, groups
        Width of a state, and groups of heads that share its input and output projections.
    kernel
        Width of the convolution.
    chunk
        Tokens of a chunk.
    """

    hidden: int
    heads: int
    inner: int
    state: int
    groups: int
    kernel: int = 4
    chunk: int = 128

    def costs(self, dtype_bytes: int = 2) -> dict[str, Any]:
        """The object ``state_space`` of a configuration: parameters, and costs per token."""
        h, inner = self.hidden, self.inner
        convolved = inner + 2 * self.groups * self.state
        projected = inner + convolved + self.heads
        convolution = convolved * (self.kernel + 1)
        inside = 2 * self.chunk * (self.groups * self.state + inner)
        states = STATE_BYTES * inner * self.state / self.chunk
        return {
            # Two projections; convolution; decay, step and skip of every head; two norms.
            "parameters": h * (projected + inner) + convolution + 3 * self.heads + inner + h,
            "flops": 2.0 * h * (projected + inner),
            "core_flops": float(inside + 4 * self.state * inner),
            # Norm and residual sum; convolution and scan; the norm of the gated output.
            "memory_traffic": float(dtype_bytes * (5 * h + 4 * convolved + 5 * inner)),
            "after_forward": dtype_bytes * (2.0 * h + projected + convolved + 2 * inner) + states,
            "after_input": float(dtype_bytes * (2 * h + projected + inner)),
        }
