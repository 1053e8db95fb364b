"""First half of a block with compressed attention (DeepSeek-AI 2026, DeepSeek-V4, §2.3).

Queries come from a latent vector, as in multi-head latent attention. Each token has one vector that is key
and value of all heads. A query attends to the vectors of a window, and to compressed ones: weighted sums of
``ratio`` vectors, which further products make from the block's input. Where an indexer chooses compressed
tokens, each of them covers twice as many tokens, so these products are twice as wide. Groups of heads are
projected to a latent vector each, and these to the stream's width. The sources of the formulas are §2.3 of
the paper and ``models/deepseek_v4/modeling_deepseek_v4.py`` of transformers 5.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from zbv_models.estimate.attention import Scores
from zbv_models.estimate.part import (
    ALL_LINEAR,
    Held,
    Matrix,
    Module,
    Part,
    Product,
    around,
    gradient,
    half_exchange,
    half_tensors,
)
from zbv_models.estimate.sees import CompressedSees
from zbv_models.estimate.shapes import Parameters, PerAction, Shapes

DOWN = ("q_a_proj", "kv_proj")
"""The projections of the block's input that LoRA may adapt."""


@dataclass(frozen=True)
class CompressedAttention:
    """Compressed attention, or with a ratio of None the window alone."""

    heads: int
    head_dim: int
    query_rank: int
    groups: int
    """Groups of heads that are projected back apart."""
    output_rank: int
    """Width of the latent vector of a group."""
    sees: CompressedSees
    indexer: tuple[int, int] | None = None
    """Heads of the indexer and their width; None if queries attend to all compressed tokens."""

    @property
    def query(self) -> int:
        """Width of all heads."""
        return self.heads * self.head_dim

    @property
    def latent_output(self) -> int:
        """Width of the latent vectors of all groups."""
        return self.groups * self.output_rank

    @property
    def compressor(self) -> int:
        """Width of the products that make compressed tokens: values and weights of one or two series."""
        series = 0 if self.sees.ratio is None else 1 if self.indexer is None else 2
        return 2 * series * (self.head_dim + (self.indexer[1] if self.indexer else 0))

    @property
    def down(self) -> int:
        """Width of all products of the block's input."""
        return self.query_rank + self.head_dim + self.compressor + (self.indexer[0] if self.indexer else 0)

    @property
    def index_queries(self) -> int:
        """Width of the indexer's queries."""
        return self.indexer[0] * self.indexer[1] if self.indexer else 0

    @cached_property
    def scores(self) -> Scores:
        """Its products of activations."""
        width = self.head_dim
        return Scores(self.heads, width, width, width, 0, self.sees, shared_keys=True)

    def part(self, shapes: Shapes) -> Part:
        """Costs and memory on one device.

        Tensor parallelism divides the products of heads. Every device computes the others for its own tokens.
        """
        h, t, tokens, own = shapes.stream.hidden, shapes.tensor, shapes.tokens, shapes.own_tokens
        products = [
            Product(own, h, self.down),
            Product(tokens, self.query_rank, self.query // t),
            Product(tokens, self.query // self.groups, self.output_rank, max(1, self.groups // t)),
            Product(tokens, self.latent_output // t, h),
        ]
        if self.indexer:
            products.append(Product(own, self.query_rank, self.index_queries, is_narrow=False))
        rotated = 2 * shapes.divided(self.query)
        # Norms of latent vectors; norm and rotation of queries, and rotation of outputs; weighted sums.
        inner = shapes.own(self.query_rank + self.head_dim + self.compressor)
        moved = PerAction(2 * inner + 3 * rotated, 3 * inner + 4 * rotated)
        return Part(
            parameters=self.parameters(shapes),
            products=tuple(products),
            core=self.scores.flops(shapes) + self.index_flops(shapes),
            is_flash=self.sees.flash,
            is_misaligned=self.scores.is_misaligned(shapes),
            tensors=tuple(self.tensors(shapes)),
            moved=around(shapes) + moved + self.scores.traffic(shapes),
            modules=(self.scores.module(shapes), Module("mla_up_proj", (products[1],), rotated)),
            exchanges=(half_exchange(shapes), self.scores.exchange(shapes)),
            workspace=self.workspace(shapes),
            output_bytes=shapes.hidden,
            matrices=tuple(self.matrices(*products[:4])),
        )

    def matrices(self, down: Product, queries: Product, groups: Product, back: Product) -> Iterator[Matrix]:
        """Those of queries, of the vectors that are keys and values, and back; without the compressor's."""
        names = ("attention", ALL_LINEAR)
        yield Matrix(("q_a_proj", *names), replace(down, n_out=self.query_rank))
        yield Matrix(("q_b_proj", *names), queries, "columns")
        yield Matrix(("kv_proj", *names), replace(down, n_out=self.head_dim))
        yield Matrix(("o_a_proj", *names), groups, "groups")
        yield Matrix(("o_b_proj", *names), back, "rows")

    def index_flops(self, shapes: Shapes) -> PerAction:
        """The indexer compares every query with all compressed tokens; I has two such products."""
        if not self.indexer or self.sees.ratio is None:
            return PerAction()
        every = CompressedSees(causal=self.sees.causal, ratio=self.sees.ratio).entries(shapes.sequence)
        pairs = every.pairs(shapes.sequence) / self.sees.ratio * shapes.sequences
        devices = shapes.tokens // shapes.own_tokens * shapes.degrees.context
        core = 2.0 * pairs * self.index_queries / devices
        return PerAction(core, 2 * core)

    def parameters(self, shapes: Shapes) -> Parameters:
        """Matrices, norms, a sink per head, and the compressor's bias per place in its window."""
        stream, h = shapes.stream, shapes.stream.hidden
        norms = stream.norm_parameters + self.query_rank + self.head_dim
        if self.sees.ratio is not None:
            # The bias of the weights; norms of compressed keys, also of the indexer's.
            norms += self.sees.ratio * self.compressor // 2 + self.head_dim
            norms += self.indexer[1] if self.indexer else 0
        return Parameters(
            shared=self.query_rank * self.query
            + self.query * self.output_rank
            + self.latent_output * h
            + self.heads,
            replicated=h * self.down + norms + self.query_rank * self.index_queries,
        )

    def tensors(self, shapes: Shapes) -> list[Held]:
        """Inputs and outputs of every product, the norms of latent vectors, and what scores read."""
        query, latent = shapes.divided(self.query), shapes.own(self.query_rank)
        back = shapes.operand(shapes.divided(self.latent_output))
        entries = 0 if self.sees.ratio is None else shapes.own(self.head_dim) // self.sees.ratio
        held = [
            *half_tensors(shapes, "attention"),
            Held(
                "input of the products down", shapes.operand(shapes.hidden), after_input=True,
                modules=("layernorm",), of=DOWN,
            ),
            gradient("gradients of the products down", shapes.operand(shapes.own(self.down)), DOWN),
            Held("latent vector of queries", latent),
            Held(
                "input of the projection to queries", shapes.operand(latent), after_input=True,
                of=("q_b_proj",),
            ),
            gradient("gradient of queries", shapes.operand(query), ("q_b_proj",)),
            Held("queries before their norm", query, modules=("mla_up_proj",)),
            Held("queries", query, modules=("mla_up_proj",)),
            Held("keys before their norm, and after it", 2 * shapes.own(self.head_dim) + entries),
            *self.scores.tensors(shapes),
            Held("output of the heads", query),
            Held(
                "input of the groups' projections", shapes.operand(query), after_input=True,
                of=("o_a_proj",),
            ),
            gradient("gradient of the groups' projections", back, ("o_a_proj",)),
            Held("input of the projection back", back, after_input=True, of=("o_b_proj",)),
            gradient("gradient of the projection back", shapes.operand(shapes.whole), ("o_b_proj",)),
        ]  # fmt: skip
        if self.compressor:
            held.append(Held("values and weights of compressed tokens", shapes.own(self.compressor)))
        if self.indexer:
            queries = shapes.own(self.index_queries + self.indexer[0])
            held.append(Held("queries and weights of the indexer", queries))
            held.append(gradient("gradients of the indexer's queries and weights", queries))
        return held

    def workspace(self, shapes: Shapes) -> int:
        """Most memory in addition to kept tensors, in I or B, as in other attention."""
        projected = shapes.divided(self.query) + shapes.own(self.head_dim)
        return self.scores.most_held(shapes, self.query, projected) + self.scores.held_of_others(shapes)
