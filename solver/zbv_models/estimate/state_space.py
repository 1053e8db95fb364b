"""Layers whose costs per token are given, and those costs of Mamba-2 and of gated delta nets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import Field

from zbv_models.estimate.part import Held, Part, Product, half_exchange
from zbv_models.estimate.sections import Amount, ConfigSection, Total
from zbv_models.estimate.shapes import Parameters, PerAction, Shapes


class GivenCosts(ConfigSection):
    """Costs per token of a layer for which zbv has no formula, on one device without parallelism.

    Tensor and context parallelism divide them.
    """

    parameters: Total = Field(description="number of parameters")
    flops: Amount = Field(description="of its products with weights in F; as many in I and in W")
    core_flops: Amount = Field(0.0, description="other operations in F; twice as many in I")
    memory_traffic: Amount = Field(0.0, description="bytes in F; twice as many in I")
    after_forward: Amount = Field(0.0, description="bytes that are kept after F")
    after_input: Amount = Field(0.0, description="bytes that are kept after I")

    def part(self, shapes: Shapes) -> Part:
        """Costs and memory on one device."""
        tokens, t = shapes.tokens, shapes.tensor
        moved = self.memory_traffic * tokens / t
        core = self.core_flops * tokens / t
        h = shapes.stream.hidden
        n_out = max(1, round(self.flops / (2 * h * t)))
        kept, waiting = (int(size * tokens) // t for size in (self.after_forward, self.after_input))
        inner = max(0, kept - shapes.hidden)
        return Part(
            parameters=Parameters(shared=self.parameters, replicated=0),
            products=(Product(self.flops * tokens / t / (2 * h * n_out), h, n_out),) if self.flops else (),
            core=PerAction(core, 2 * core, 0.0),
            tensors=(
                Held("input", shapes.hidden, is_input=True),
                Held("tensors inside the layer", inner),
                Held("inputs and gradients of its products", waiting, after_forward=False, after_input=True),
            ),
            moved=PerAction(moved, 2 * moved, 0.0),
            exchanges=(half_exchange(shapes),),
            workspace=shapes.whole + inner // 2,
            output_bytes=shapes.hidden,
        )


STATE_BYTES = 4
"""Size of a value of a state: float32."""


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


@dataclass(frozen=True)
class DeltaNet:
    """The sizes of a gated delta net (Yang et al. 2024, Gated Delta Networks, arXiv 2412.06464).

    The rule is computed in chunks (§3.3; Yang et al. 2024, Parallelizing Linear Transformers with the Delta
    Rule, arXiv 2406.06484, §3): inside a chunk the keys' products and the inverse of their triangle, which
    is applied to keys and values; scores and outputs; and products with the state before the chunk, and the
    update of that state.
    """

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
