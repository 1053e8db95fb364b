"""First half of a block with attention: norm, projections, scores, residual."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from zbv_models.estimate.part import (
    Exchange,
    Held,
    Linear,
    Module,
    Part,
    Product,
    around,
    dropout_traffic,
    gradient,
    half_exchange,
    half_tensors,
)
from zbv_models.estimate.shapes import STATISTIC_BYTES, Parameters, PerAction, Shapes

ALIGNED_BYTES = 16
"""Tensor cores need this alignment for full speed (NVIDIA, Matrix Multiplication Background, §3)."""


@dataclass(frozen=True)
class Sees:
    """Which pairs of queries and keys are computed, and how."""

    flash: bool = True
    """Flash attention keeps no scores; plain attention keeps them."""
    causal: bool = True
    """Whether flash attention leaves out the half of the scores that is masked."""
    window: int | None = None
    """Most tokens that a query attends to; None for all."""
    chunked: bool = False
    """Whether the window is a piece of the sequence, within which queries attend."""

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


CHOICE_BYTES = 4
"""Size of the index of a chosen token."""


@dataclass(frozen=True)
class Indexer:
    """Heads that choose the tokens that a query attends to (DeepSeek-AI 2025b, DeepSeek-V3.2, §2.1).

    They compare every query with all keys, which they share, and attention uses the best ones. A device
    computes them for its own tokens, with all heads (Megatron-LM, ``DSAIndexer``).
    """

    heads: int
    dim: int
    """Width of a head."""

    def added_to(self, part: Part, shapes: Shapes, sees: Sees, width: int) -> Part:
        """Attention with these heads, whose queries come from a vector of a width.

        Keys and weights of heads come from the block's input. I has two products, for queries and keys; the
        scores are not kept.
        """
        rows, h, queries = shapes.own_tokens, shapes.stream.hidden, self.heads * self.dim
        pairs = Sees(causal=sees.causal).pairs(shapes.sequence)
        whole = shapes.tokens // rows * shapes.degrees.context
        core = 2.0 * pairs * shapes.sequences * queries / whole
        chosen = CHOICE_BYTES * rows * min(sees.window or shapes.sequence, shapes.sequence)
        kept = shapes.own(queries + self.dim + self.heads)
        # Norm and rotation of queries and keys, and the choice.
        moved = 2.0 * shapes.own(queries + self.dim) + chosen
        # Its matrices, and the LayerNorm of its keys.
        parameters = width * queries + h * (self.dim + self.heads) + 2 * self.dim
        return replace(
            part,
            parameters=part.parameters + Parameters(replicated=parameters),
            products=(
                *part.products,
                Product(rows, width, queries, is_narrow=False),
                Product(rows, h, self.dim + self.heads, is_narrow=False),
            ),
            core=part.core + PerAction(core, 2 * core),
            tensors=(
                *part.tensors,
                Held("queries, keys and weights of the indexer", kept),
                Held("chosen tokens", chosen),
                gradient("gradients of the indexer's queries, keys and weights", kept),
            ),
            moved=part.moved + PerAction(moved, moved),
            saved=None,
        )


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

    @property
    def query(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def projected(self) -> int:
        """Width of the product that makes queries, keys, values and the gate."""
        return self.query * (2 if self.output_gate else 1) + 2 * self.key

    @cached_property
    def scores(self) -> Scores:
        """Its products of activations."""
        width, key = self.head_dim, self.key
        return Scores(self.heads, width, width, key, key, self.sees)

    def part(self, shapes: Shapes) -> Part:
        """Costs and memory on one device."""
        h, t, tokens = shapes.stream.hidden, shapes.tensor, shapes.tokens
        rotated = shapes.divided(self.query) + shapes.divided(self.key)
        moved = around(shapes) + self.scores.traffic(shapes)
        products = Product(tokens, h, self.projected // t), Product(tokens, self.query // t, h)
        if self.output_gate:
            moved += PerAction(3 * shapes.divided(self.query), 5 * shapes.divided(self.query))
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
            saved=None if self.output_gate else self.scores.saved(shapes),
        )
        return part if self.indexer is None else self.indexer.added_to(part, shapes, self.sees, h)

    def parameters(self, shapes: Shapes) -> Parameters:
        """Norm, projection to queries, keys and values, and the projection back.

        Shoeybi et al. 2019, §3, for the division by tensor parallelism; Ainslie et al. 2023, §2, for fewer
        key and value heads than query heads.
        """
        stream = shapes.stream
        h, both = stream.hidden, self.projected
        head_norms = 2 * self.head_dim if self.qk_norm else 0
        return Parameters(
            shared=h * both + self.query * h + (both if self.qkv_bias else 0),
            replicated=stream.norm_parameters + head_norms + (h if stream.bias else 0),
        )

    def tensors(self, shapes: Shapes) -> list[Held]:
        """13 s b h + 5 a s² b with dropout in 16 bits (Korthikanti et al. 2022, §4.1)."""
        query, key = shapes.divided(self.query), shapes.divided(self.key)
        held = [
            *half_tensors(shapes, "attention"),
            Held(
                "input of the projection to queries, keys, values",
                shapes.operand(shapes.kept_input),
                after_input=True,
            ),
            gradient("gradients of queries, keys, values", shapes.operand(shapes.divided(self.projected))),
            Held("queries", query),
            Held("keys", key),
            Held("values", key),
            *self.scores.tensors(shapes),
            *projection_back(shapes, query),
        ]
        if self.qk_norm:
            rows = (self.heads + self.kv_heads) // shapes.tensor * shapes.tokens
            held.append(Held("queries and keys before their norms", query + key))
            held.append(Held("statistics of their norms", shapes.statistics * rows))
        if self.output_gate:
            held.append(Held("gate", query))
            held.append(Held("output of the heads", query))
        return held

    def workspace(self, shapes: Shapes) -> int:
        """Most memory in addition to kept tensors, in I or B."""
        h, query = shapes.stream.hidden, shapes.divided(self.query)
        # When B computes the gradient of the first projection, queries, keys and values (whose gradients are
        # as large) and the input of the projection back are released.
        first = shapes.weight(h, self.projected) + shapes.whole + shapes.hidden - query
        others = self.scores.most_held(shapes, self.query, shapes.divided(self.projected))
        return max(others, first) + self.scores.held_of_others(shapes)


def projection_back(shapes: Shapes, heads: int) -> list[Held]:
    """The heads' output, of the given size, and the gradient of what is computed from it.

    The gradient of a sum over the tensor-parallel group is whole: it is gathered for I and queued in that
    form. Flash attention reads its output again in I, so it keeps it also where the product takes a narrow
    copy.
    """
    held = [
        Held("input of the projection back", shapes.operand(heads), after_input=True),
        gradient("gradient of the projection back", shapes.operand(shapes.whole)),
    ]
    if shapes.keeps_narrow:
        held.append(Held("output of the heads", heads))
    return held
