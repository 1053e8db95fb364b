"""Attention's products of activations: scores, and their product with the values.

They have no weight, so both products of the backward belong to I (Qi et al. 2023, table 1).
"""

from __future__ import annotations

from dataclasses import dataclass

from zbv_models.estimate.amounts import PerAction
from zbv_models.estimate.part import Exchange, Held, Module, dropout_traffic
from zbv_models.estimate.shapes import STATISTIC_BYTES, Shapes

ALIGNED_BYTES = 16
"""Tensor cores need this alignment for full speed (NVIDIA, Matrix Multiplication Background, §3)."""


@dataclass(frozen=True)
class Sees:
    """Which pairs of queries and keys are computed, and how.

    Attributes
    ----------
    flash
        Flash attention keeps no scores; plain attention keeps them.
    causal
        Whether flash attention leaves out the half of the scores that is masked.
    window
        Most tokens that a query attends to; None for all.
    chunked
        Whether the window is a piece of the sequence, within which queries attend.
    """

    flash: bool = True
    causal: bool = True
    window: int | None = None
    chunked: bool = False

    def pairs(self, sequence: int) -> float:
        """Queries times keys of a sequence: s²; flash attention with a window of w computes 2sw - w².

        Pieces of w tokens have w² each. Of all these, it computes half where the mask is causal (Dao 2023,
        §4.1). Plain attention computes s².
        """
        if not self.flash:
            return float(sequence**2)
        window = sequence if self.window is None else min(self.window, sequence)
        if self.chunked:
            pairs = float(sequence // window * window**2 + (sequence % window) ** 2)
        else:
            pairs = float(2 * sequence * window - window**2)
        return pairs / 2 if self.causal else pairs


ALL = Sees()
"""Flash attention under a causal mask, without a window."""


@dataclass(frozen=True)
class Scores:
    """The heads of one attention layer.

    Attributes
    ----------
    key_dim, value_dim
        Widths of a head's queries and keys, and of its values.
    key_width, value_width
        Widths of all keys and of all values, which fewer heads may have (Ainslie et al. 2023, §2).
    shared_keys
        Whether all heads share keys and values, so that tensor parallelism does not divide them.
    """

    heads: int
    key_dim: int
    value_dim: int
    key_width: int
    value_width: int
    sees: Sees = ALL
    shared_keys: bool = False

    @property
    def flash(self) -> bool:
        """Whether it is flash attention."""
        return self.sees.flash

    def flops(self, shapes: Shapes) -> PerAction:
        """Operations on one device.

        2 for every pair, head and dimension of keys, and of values. I of plain attention has twice as many.
        I of flash attention computes the scores again, which makes three products as wide as keys and two as
        wide as values: 2.5 times F if both are equal (Dao 2023, §4.1). Context parallelism divides the pairs
        evenly, because every device has an early and a late piece of each sequence (Grattafiori et al. 2024,
        §3.3.2; Megatron-LM, ``get_batch_on_this_cp_rank``).
        """
        devices = shapes.tensor * shapes.degrees.context
        once = 2.0 * self.sees.pairs(shapes.sequence) * shapes.sequences * self.heads / devices
        keys, values = once * self.key_dim, once * self.value_dim
        again = 3 * keys + 2 * values if self.flash else 2 * (keys + values)
        return PerAction(keys + values, again, 0.0)

    def is_misaligned(self, shapes: Shapes) -> bool:
        """Whether heads of plain attention are not aligned: their width in bytes is no multiple of 16."""
        return not self.flash and any(
            width * shapes.stream.dtype_bytes % ALIGNED_BYTES for width in (self.key_dim, self.value_dim)
        )

    def bytes(self, shapes: Shapes) -> int:
        """Size of the scores of plain attention."""
        heads = self.heads // shapes.tensor
        return shapes.stream.dtype_bytes * heads * shapes.tokens * shapes.sequence

    def traffic(self, shapes: Shapes) -> PerAction:
        """Softmax of plain scores, and its dropout. Flash attention keeps scores on chip."""
        if self.flash:
            return PerAction()
        size = self.bytes(shapes)
        return PerAction(2 * size, 3 * size) + dropout_traffic(shapes, size)

    def tensors(self, shapes: Shapes) -> list[Held]:
        """Softmax and its dropout (Korthikanti et al. 2022, §4.1: 5 a s² b in 16 bits).

        Flash attention keeps the normaliser of every row instead (Dao et al. 2022, §3.1).
        """
        if self.flash:
            rows = self.heads // shapes.tensor * shapes.tokens
            return [Held("softmax normalisers", STATISTIC_BYTES * rows, modules=("core_attn",))]
        size = self.bytes(shapes)
        held = [Held("softmax", size, modules=("core_attn",))]
        if shapes.stream.dropout:
            held.append(Held("mask of the softmax", shapes.mask(size), modules=("core_attn",)))
            held.append(Held("softmax after dropout", size, modules=("core_attn",)))
        return held

    def saved(self, shapes: Shapes) -> int | None:
        """Bytes of the outputs of flash attention; None with plain attention, which torchtitan lacks."""
        if not self.flash:
            return None
        outputs = shapes.divided(self.heads * self.value_dim)
        return outputs + sum(tensor.bytes for tensor in self.tensors(shapes))

    def module(self, shapes: Shapes) -> Module:
        """Selective recomputation of the scores."""
        return Module("core_attn", moved=self.traffic(shapes).forward, has_core=True)

    def exchange(self, shapes: Shapes) -> Exchange:
        """Keys and values between the devices that share a sequence.

        A device sends its own c - 1 times in F, and again together with their gradients in I: around a ring
        (Liu et al. 2023, §3), or in an all-gather in F, and another one and a reduce-scatter in I
        (Transformer Engine, ``AttnFuncWithCPAndKVAllGather``). A window does not make it less.
        """
        others = shapes.degrees.context - 1
        sent = float(others * self.piece(shapes))
        if shapes.degrees.gathers_context:
            calls = PerAction(1, 2) if others else PerAction()
        else:
            calls = PerAction(others, others)
        return Exchange("context", PerAction(sent, 2 * sent), calls)

    def piece(self, shapes: Shapes) -> int:
        """Size of a device's keys and values."""
        width = self.key_width + self.value_width
        return shapes.divided(width) * (shapes.tensor if self.shared_keys else 1)

    def workspace(self, shapes: Shapes) -> int:
        """What I needs of keys and values of other devices, with their gradients.

        A ring holds one piece that it computes with and one that arrives; an all-gather holds all of them.
        """
        context = shapes.degrees.context
        if context == 1:
            return 0
        return 2 * self.piece(shapes) * (context if shapes.degrees.gathers_context else 2)
