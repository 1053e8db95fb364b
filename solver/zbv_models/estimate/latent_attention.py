"""First half of a block with multi-head latent attention (DeepSeek-AI 2024a, DeepSeek-V2, §2.1).

Queries, and keys with values, are each projected down to a latent vector, normalised, and projected up to the
heads. A part of every key, the rotated one, is computed from the block's input and shared by all heads.
Training materialises keys and values of all heads, as Megatron-LM does
(``megatron/core/transformer/multi_latent_attention.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from zbv_models.estimate.attention import Scores, projection_back
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
    gradient,
    group_sum,
    half_tensors,
    norm_module,
)
from zbv_models.estimate.sees import ALL, Sees
from zbv_models.estimate.shapes import Parameters, PerAction, Shapes

DOWN = ("q_a_proj", "kv_a_proj_with_mqa")
"""The projections down."""


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention."""

    heads: int
    query_rank: int | None
    """Width of the queries' latent vector; None if queries are projected directly."""
    kv_rank: int
    """Width of the latent vector of keys and values."""
    plain_dim: int
    rotated_dim: int
    """Widths of a head's queries and keys: computed from the latent vector, and rotated."""
    value_dim: int
    """Width of a head's values."""
    sees: Sees = ALL
    indexer: Indexer | None = None
    """What chooses the tokens of the window; None if these are the nearest ones."""
    absorbed: bool = False
    """Whether scores are computed with the latent vector of keys and values, which all heads share:
    queries and outputs are as wide as it (DeepSeek-AI 2025b, DeepSeek-V3.2, §2.1; Megatron-LM,
    ``_run_sparse_attention``)."""
    gate: int = 0
    """Width of a gate from the block's input, whose sigmoid scales the heads' output: that of the output
    (Kimi K3), or one value per head."""

    @property
    def key_dim(self) -> int:
        """Width of a head's queries and keys."""
        return self.plain_dim + self.rotated_dim

    @property
    def down(self) -> int:
        """Width of the product that makes the latent vectors and the rotated part of the keys."""
        return (self.query_rank or 0) + self.kv_rank + self.rotated_dim

    @property
    def up(self) -> int:
        """Width of all heads' keys, without the rotated part, and values."""
        return self.heads * (self.plain_dim + self.value_dim)

    @cached_property
    def scores(self) -> Scores:
        """Its products of activations."""
        if self.absorbed:
            width = self.kv_rank + self.rotated_dim
            return Scores(self.heads, width, self.kv_rank, width, 0, self.sees, shared_keys=True)
        keys, values = self.heads * self.key_dim, self.heads * self.value_dim
        return Scores(self.heads, self.key_dim, self.value_dim, keys, values, self.sees)

    def part(self, shapes: Shapes) -> Part:
        """Costs and memory on one device.

        Tensor parallelism divides the projections up and back. Every device has those down whole, and
        computes them for its own tokens.
        """
        h, t, tokens = shapes.stream.hidden, shapes.tensor, shapes.tokens
        queries = self.heads * self.key_dim
        projections = (
            Product(shapes.own_tokens, h, self.down),
            Product(tokens, self.query_rank or h, queries // t),
            Product(tokens, self.kv_rank, self.up // t),
            Product(tokens, self.heads * self.value_dim // t, h),
            *((Product(tokens, h, self.gate // t),) if self.gate else ()),
        )
        latent = shapes.own((self.query_rank or 0) + self.kv_rank)
        heads = shapes.divided(2 * queries)
        norms = PerAction(2 * latent, 3 * latent)
        # The rotated parts are joined to queries and keys, which copies both.
        joined = PerAction(2 * heads, 2 * heads)
        outputs = shapes.divided(2 * self.heads * self.value_dim + self.gate) if self.gate else 0
        gated = PerAction(outputs, 2 * outputs)
        part = Part(
            parameters=self.parameters(shapes),
            products=projections,
            core=self.scores.flops(shapes),
            is_flash=self.sees.flash,
            is_misaligned=self.scores.is_misaligned(shapes),
            is_uneven=self.scores.is_uneven,
            tensors=tuple(self.tensors(shapes)),
            moved=around(shapes) + norms + joined + gated + self.scores.traffic(shapes),
            modules=(
                self.scores.module(shapes),
                norm_module(shapes),
                Module("mla_up_proj", projections[1:3], joined.forward),
            ),
            exchanges=(self.exchange(shapes), self.scores.exchange(shapes)),
            workspace=self.workspace(shapes),
            output_bytes=shapes.hidden,
            linears=self.linears(shapes),
            saved=None if self.absorbed or self.gate else self.scores.saved(shapes),
            matrices=tuple(self.matrices(projections)),
        )
        if self.indexer is None:
            return part
        return self.indexer.added_to(part, shapes, self.sees, self.query_rank or h)

    def matrices(self, products: tuple[Product, ...]) -> Iterator[Matrix]:
        """Those down, up, and back."""
        down, queries, both, back = products[:4]
        groups = ("attention", ALL_LINEAR)
        if self.query_rank is None:
            yield Matrix(("q_proj", "linear_q_proj", *groups), queries, "columns")
        else:
            of_queries = replace(down, n_out=self.query_rank)
            yield Matrix(("q_a_proj", "linear_q_down_proj", *groups), of_queries)
            yield Matrix(("q_b_proj", "linear_q_up_proj", *groups), queries, "columns")
        of_keys = replace(down, n_out=self.kv_rank + self.rotated_dim)
        yield Matrix(("kv_a_proj_with_mqa", "linear_kv_down_proj", *groups), of_keys)
        yield Matrix(("kv_b_proj", "linear_kv_up_proj", *groups), both, "columns")
        yield Matrix(("o_proj", "linear_proj", *groups), back, "rows")
        for gate in products[4:]:
            yield Matrix(("g_proj", *groups), gate, "columns")

    def linears(self, shapes: Shapes) -> tuple[Linear, ...]:
        """Projections of queries, of keys and values, and back (torchtitan, ``deepseek_v3/model.py``).

        torchtitan computes those down for all tokens of the group (``deepseek_v3/sharding.py``).
        """
        h, t, tokens, kv = shapes.stream.hidden, shapes.tensor, shapes.tokens, self.kv_rank

        def down(width: int) -> Linear:
            return Linear(Product(tokens, h, width), shapes.stream.dtype_bytes * tokens * width)

        def divided(n_in: int, width: int) -> Linear:
            return Linear(Product(tokens, n_in, width // t), shapes.divided(width))

        back = Linear(Product(tokens, self.heads * self.value_dim // t, h), shapes.whole)
        queries = self.heads * self.key_dim
        of_queries = [divided(h, queries)]
        if self.query_rank is not None:
            of_queries = [down(self.query_rank), divided(self.query_rank, queries)]
        return (*of_queries, down(kv + self.rotated_dim), divided(kv, self.up), back)

    def parameters(self, shapes: Shapes) -> Parameters:
        """DeepSeek-AI 2024a, appendix C, with the norms of latent vectors; no biases."""
        h, q, kv = shapes.stream.hidden, self.query_rank, self.kv_rank
        stream, queries = shapes.stream, self.heads * self.key_dim
        return Parameters(
            shared=(q or h) * queries + kv * self.up + self.heads * self.value_dim * h + h * self.gate,
            replicated=h * self.down + stream.norm_parameters + ((q or 0) + kv) * stream.norm_values,
        )

    def tensors(self, shapes: Shapes) -> list[Held]:
        """Inputs and outputs of every projection, the norms of latent vectors, and what scores read."""
        h, q, kv = shapes.stream.hidden, self.query_rank, self.kv_rank
        keys, values = (shapes.divided(self.heads * width) for width in (self.key_dim, self.value_dim))
        rows = shapes.statistics * shapes.own_tokens
        sizes = (("queries", keys), ("keys", keys), ("values", values))
        of_heads = [Held(name, size, modules=("mla_up_proj",)) for name, size in sizes]
        held = [
            *half_tensors(shapes, "attention"),
            Held(
                "input of the projections down",
                shapes.operand(shapes.own(h)),
                after_input=True,
                modules=("layernorm",),
                of=(*DOWN, "q_proj", "g_proj"),
            ),
            gradient("gradients of the projections down", shapes.operand(shapes.own(self.down)), DOWN),
            Held("latent vector of keys and values", shapes.own(kv)),
            Held("statistics of its norm", rows),
            Held(
                "input of the projection to keys and values",
                shapes.operand(shapes.own(kv)),
                after_input=True,
                of=("kv_b_proj",),
            ),
            gradient("gradients of keys and values", shapes.operand(shapes.divided(self.up)), ("kv_b_proj",)),
            gradient("gradient of queries", shapes.operand(keys), ("q_proj", "q_b_proj")),
            *(self.absorbed_tensors(shapes) if self.absorbed else of_heads),
            *self.scores.tensors(shapes),
            *projection_back(shapes, values, self.sees.flash),
        ]
        if self.gate:
            held.append(Held("gate", shapes.divided(self.gate)))
            held.append(Held("output of the heads", values))
            of_gate = shapes.operand(shapes.divided(self.gate))
            held.append(gradient("gradient of the gate", of_gate, ("g_proj",)))
        if q is not None:
            held.append(Held("latent vector of queries", shapes.own(q)))
            held.append(Held("statistics of the queries' norm", rows))
            held.append(
                Held(
                    "input of the projection to queries",
                    shapes.operand(shapes.own(q)),
                    after_input=True,
                    of=("q_b_proj",),
                )
            )
        return held

    def absorbed_tensors(self, shapes: Shapes) -> list[Held]:
        """Queries before and after the product with the keys' matrix, keys, and the scores' outputs."""
        queries = shapes.divided(self.heads * (self.kv_rank + self.rotated_dim))
        outputs = shapes.divided(self.heads * self.kv_rank)
        plain, of = shapes.divided(self.heads * self.plain_dim), ("kv_b_proj",)
        return [
            Held("input of the product of queries", shapes.operand(plain), after_input=True, of=of),
            Held("queries", queries, modules=("mla_up_proj",)),
            Held("keys", shapes.own(self.kv_rank + self.rotated_dim)),
            Held("outputs of the scores", outputs, after_input=True, of=of, for_input=True),
            gradient("gradient of latent queries", shapes.operand(outputs), of),
        ]

    def exchange(self, shapes: Shapes) -> Exchange:
        """Tensor-parallel collectives: latent vectors are gathered before they are projected up.

        Their gradients are summed in I; the output and its gradient as in other attention.
        """
        h = shapes.stream.hidden
        gathered = self.down if self.query_rank is not None else self.down + h
        both = gathered + h
        if shapes.degrees.sequence_parallel:
            each = group_sum(shapes, PerAction(1, 1, 0), PerAction(2, 2, 1), both)
            more = group_sum(shapes, PerAction(0, 0, 1), PerAction(), gathered)
            # Vectors and output are gathered and scattered one after the other.
            return Exchange("tensor", each.sent + more.sent, each.calls, each.steps + each.steps + more.steps)
        forward = group_sum(shapes, PerAction(2, 0, 0), PerAction(1, 1, 0), h)
        backward = group_sum(shapes, PerAction(0, 2, 0), PerAction(), gathered)
        steps = forward.steps + backward.steps
        return Exchange("tensor", forward.sent + backward.sent, forward.calls, steps)

    def workspace(self, shapes: Shapes) -> int:
        """Most memory in addition to kept tensors, in I or B, as in other attention."""
        width = 2 * self.key_dim + self.value_dim
        if self.absorbed:
            width = 2 * (self.kv_rank + self.rotated_dim)
        projected = shapes.divided(self.heads * width)
        most = self.scores.most_held(shapes, self.heads * self.value_dim, projected)
        return most + self.scores.held_of_others(shapes)
