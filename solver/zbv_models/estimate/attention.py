"""First half of a block with attention: norm, projections, scores, residual."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from zbv_models.estimate.indexer import Indexer
from zbv_models.estimate.part import (
    ALL_LINEAR,
    Exchange,
    Held,
    Linear,
    Matrix,
    Module,
    Part,
    Product,
    around,
    dropout_traffic,
    gradient,
    half_exchange,
    half_tensors,
)
from zbv_models.estimate.sees import ALL, Sees
from zbv_models.estimate.shapes import STATISTIC_BYTES, Parameters, PerAction, Shapes

INPUTS = ("q_proj", "k_proj", "v_proj")
"""The matrices of the block's input."""
ALIGNED_BYTES = 16
"""Tensor cores need this alignment for full speed (NVIDIA, Matrix Multiplication Background, §3)."""


@dataclass(frozen=True)
class Scores:
    """Attention's products of activations in one layer: scores, and their product with the values.

    They have no weight, so both products of the backward belong to I (Qi et al. 2023, table 1).
    """

    heads: int
    key_dim: int
    value_dim: int
    """Widths of a head's queries and keys, and of its values."""
    key_width: int
    value_width: int
    """Widths of all keys and of all values, which fewer heads may have (Ainslie et al. 2023, §2)."""
    sees: Sees = ALL
    shared_keys: bool = False
    """Whether all heads share keys and values, so that tensor parallelism does not divide them."""

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

    @property
    def is_uneven(self) -> bool:
        """Whether a head's keys and values differ in width."""
        return self.key_dim != self.value_dim

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

    def most_held(self, shapes: Shapes, width: int, projected: int) -> int:
        """Most memory of I, and of B at the projection back, in addition to kept tensors.

        Parameters
        ----------
        width
            That of the heads' output.
        projected
            Size of queries, keys and values.
        """
        # I holds most when it has computed its gradients and released nothing: the gradients of the residual
        # stream, of the heads' output, and of queries, keys and values. With plain attention, the last three
        # exist twice for a moment, together with the scores and their gradient.
        around = shapes.whole + shapes.divided(width)
        twice = 0 if self.flash else projected + 2 * self.bytes(shapes)
        # B also computes the gradients of weights. For the projection back, everything that F kept is still
        # there.
        return around + max(projected + twice, shapes.weight(width, shapes.stream.hidden))

    def held_of_others(self, shapes: Shapes) -> int:
        """What I needs of keys and values of other devices, with their gradients.

        A ring holds one piece that it computes with and one that arrives; an all-gather holds all of them.
        """
        context = shapes.degrees.context
        if context == 1:
            return 0
        return 2 * self.piece(shapes) * (context if shapes.degrees.gathers_context else 2)


@dataclass(frozen=True)
class Attention:
    """Multi-head attention; with fewer key and value heads, grouped-query attention."""

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    """Whether the projection to queries, keys and values has a bias."""
    qk_norm: bool = False
    """Whether queries and keys are normalised per head."""
    rotary: bool = True
    sees: Sees = ALL
    output_gate: bool = False
    """Whether a product with the block's input, after a sigmoid, scales the heads' output (Qiu et al.
    2025, Gated Attention)."""
    indexer: Indexer | None = None
    """What chooses the tokens of the window; None if these are the nearest ones."""
    value_dim: int | None = None
    """Width of a head's values; None if it is that of its keys."""
    shared_values: bool = False
    """Whether values are the projected keys, so that one matrix makes both (Gemma 4)."""
    reads_keys: bool = False
    """Whether keys and values are those of an earlier block (Gemma Team 2025, Gemma 3n: KV sharing)."""
    head_gate: bool = False
    """Whether a gate as ``output_gate`` has one value per head (Step-3.5)."""

    @property
    def query(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all key heads."""
        return self.kv_heads * self.head_dim

    @property
    def value(self) -> int:
        """Width of all value heads."""
        return self.kv_heads * (self.value_dim or self.head_dim)

    @property
    def output(self) -> int:
        """Width of what all heads give."""
        return self.heads * (self.value_dim or self.head_dim)

    @property
    def projected(self) -> int:
        """Width of the product that makes queries, keys, values and the gate."""
        gate = (self.output if self.output_gate else 0) + (self.heads if self.head_gate else 0)
        of_keys = 0 if self.reads_keys else self.key
        return self.query + gate + of_keys + (0 if self.shared_values or self.reads_keys else self.value)

    @cached_property
    def scores(self) -> Scores:
        """Its products of activations."""
        width = self.head_dim
        return Scores(self.heads, width, self.value_dim or width, self.key, self.value, self.sees)

    def part(self, shapes: Shapes) -> Part:
        """Costs and memory on one device."""
        h, t, tokens = shapes.stream.hidden, shapes.tensor, shapes.tokens
        rotated = shapes.divided(self.query) + shapes.divided(self.key)
        moved = around(shapes) + self.scores.traffic(shapes)
        products = Product(tokens, h, self.projected // t), Product(tokens, self.output // t, h)
        if self.output_gate or self.head_gate:
            moved += PerAction(3 * shapes.divided(self.output), 5 * shapes.divided(self.output))
        if self.rotary:
            moved += PerAction(2 * rotated, 2 * rotated)
        if self.qk_norm:
            moved += PerAction(2 * rotated, 3 * rotated)
        part = Part(
            parameters=self.parameters(shapes),
            products=products,
            core=self.scores.flops(shapes),
            is_flash=self.sees.flash,
            is_misaligned=self.scores.is_misaligned(shapes),
            is_uneven=self.scores.is_uneven,
            tensors=tuple(self.tensors(shapes)),
            moved=moved,
            modules=(self.scores.module(shapes),),
            exchanges=(half_exchange(shapes), self.scores.exchange(shapes)),
            workspace=self.workspace(shapes),
            output_bytes=shapes.hidden,
            linears=(
                Linear(products[0], shapes.divided(self.projected), self.qkv_bias),
                Linear(products[1], shapes.whole, shapes.stream.bias),
            ),
            saved=None if self.output_gate or self.head_gate else self.scores.saved(shapes),
            matrices=tuple(self.matrices(shapes, *products)),
        )
        return part if self.indexer is None else self.indexer.added_to(part, shapes, self.sees, h)

    def matrices(self, shapes: Shapes, first: Product, last: Product) -> Iterator[Matrix]:
        """Those of queries (with a gate), keys, values, all of them together, and the projection back."""
        of_values = 0 if self.shared_values or self.reads_keys else self.value
        of_keys = 0 if self.reads_keys else self.key
        widths = (self.projected - of_keys - of_values, of_keys, of_values)
        for name, width in zip(INPUTS, widths, strict=True):
            if width:
                product = replace(first, n_out=width // shapes.tensor)
                yield Matrix((name, "attention", ALL_LINEAR), product, "columns")
        yield Matrix(("linear_qkv",), first, "columns")
        yield Matrix(("o_proj", "linear_proj", "attention", ALL_LINEAR), last, "rows")

    def parameters(self, shapes: Shapes) -> Parameters:
        """Norm, projection to queries, keys and values, and the projection back.

        Shoeybi et al. 2019, §3, for the division by tensor parallelism; Ainslie et al. 2023, §2, for fewer
        key and value heads than query heads.
        """
        stream = shapes.stream
        h, both = stream.hidden, self.projected
        head_norms = (1 if self.reads_keys else 2) * self.head_dim if self.qk_norm else 0
        return Parameters(
            shared=h * both + self.output * h + (both if self.qkv_bias else 0),
            replicated=stream.norm_parameters + head_norms + (h if stream.bias else 0),
        )

    def tensors(self, shapes: Shapes) -> list[Held]:
        """13 s b h + 5 a s² b with dropout in 16 bits (Korthikanti et al. 2022, §4.1)."""
        query, output = shapes.divided(self.query), shapes.divided(self.output)
        key, value = (0, 0) if self.reads_keys else (shapes.divided(self.key), shapes.divided(self.value))
        held = [
            *half_tensors(shapes, "attention"),
            Held(
                "input of the projection to queries, keys, values",
                shapes.operand(shapes.kept_input),
                after_input=True,
                of=(*INPUTS, "linear_qkv"),
            ),
            gradient(
                "gradients of queries, keys, values",
                shapes.operand(shapes.divided(self.projected)),
                (*INPUTS, "linear_qkv"),
            ),
            Held("queries", query),
            Held("keys", key),
            Held("values", value),
            *self.scores.tensors(shapes),
            *projection_back(shapes, output, self.sees.flash),
        ]
        if self.qk_norm:
            rows = (self.heads + self.kv_heads) // shapes.tensor * shapes.tokens
            held.append(Held("queries and keys before their norms", query + key))
            held.append(Held("statistics of their norms", shapes.statistics * rows))
        if self.output_gate or self.head_gate:
            held.append(Held("gate", output if self.output_gate else shapes.divided(self.heads)))
            held.append(Held("output of the heads", output))
        return held

    def workspace(self, shapes: Shapes) -> int:
        """Most memory in addition to kept tensors, in I or B."""
        h, output = shapes.stream.hidden, shapes.divided(self.output)
        # When B computes the gradient of the first projection, queries, keys and values (whose gradients are
        # as large) and the input of the projection back are released.
        first = shapes.weight(h, self.projected) + shapes.whole + shapes.hidden - output
        others = self.scores.most_held(shapes, self.output, shapes.divided(self.projected))
        return max(others, first) + self.scores.held_of_others(shapes)


def projection_back(shapes: Shapes, heads: int, is_flash: bool = True) -> list[Held]:
    """The heads' output, of the given size, and the gradient of what is computed from it.

    The gradient of a sum over the tensor-parallel group is whole: it is gathered for I and queued in that
    form. Flash attention reads its output again in I, so it keeps it also where the product takes a narrow
    copy.
    """
    held = [
        Held(
            "input of the projection back",
            shapes.operand(heads),
            after_input=True,
            of=("o_proj",),
            for_input=is_flash and not shapes.keeps_narrow,
        ),
        gradient("gradient of the projection back", shapes.operand(shapes.whole), ("o_proj",)),
    ]
    if shapes.keeps_narrow:
        held.append(Held("output of the heads", heads))
    return held
