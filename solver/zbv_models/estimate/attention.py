"""First half of a block: norm, projections, scores, residual."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from zbv_models.estimate.amounts import PerAction
from zbv_models.estimate.indexer import Indexer
from zbv_models.estimate.parameters import Parameters
from zbv_models.estimate.part import (
    Held,
    Linear,
    Part,
    Product,
    around,
    dropout_tensors,
    gradient,
    half_exchange,
    half_norms,
)
from zbv_models.estimate.scores import ALL, Scores, Sees
from zbv_models.estimate.shapes import Shapes


@dataclass(frozen=True)
class Attention:
    """Multi-head attention; with fewer key and value heads, grouped-query attention.

    Attributes
    ----------
    qkv_bias
        Whether the projection to queries, keys and values has a bias.
    qk_norm
        Whether queries and keys are normalised per head.
    output_gate
        Whether a product with the block's input, after a sigmoid, scales the heads' output (Qiu et al. 2025,
        Gated Attention).
    indexer
        What chooses the tokens of the window; None if these are the nearest ones.
    """

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    qk_norm: bool = False
    rotary: bool = True
    sees: Sees = ALL
    output_gate: bool = False
    indexer: Indexer | None = None

    @property
    def query(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def flash(self) -> bool:
        """Whether it is flash attention."""
        return self.sees.flash

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
        moved, core = around(shapes) + self.scores.traffic(shapes), self.scores.flops(shapes)
        products = [Product(tokens, h, self.projected // t), Product(tokens, self.query // t, h)]
        if self.output_gate:
            moved += PerAction(3 * shapes.divided(self.query), 5 * shapes.divided(self.query))
        if self.indexer is not None:
            products += self.indexer.products(shapes, h)
            core += self.indexer.flops(shapes, Sees(causal=self.sees.causal).pairs(shapes.sequence))
            moved += self.indexer.traffic(shapes, self.sees.window or shapes.sequence)
        if self.rotary:
            moved += PerAction(2 * rotated, 2 * rotated)
        if self.qk_norm:
            moved += PerAction(2 * rotated, 3 * rotated)
        return Part(
            parameters=self.parameters(shapes),
            products=tuple(products),
            core=core,
            is_flash=self.flash,
            is_misaligned=self.scores.is_misaligned(shapes),
            tensors=tuple(self.tensors(shapes)),
            moved=moved,
            modules=(self.scores.module(shapes),),
            exchanges=(half_exchange(shapes), self.scores.exchange(shapes)),
            workspace=self.workspace(shapes) + self.scores.workspace(shapes),
            output_bytes=shapes.hidden,
            linears=(
                Linear(products[0], shapes.divided(self.projected), self.qkv_bias),
                Linear(products[1], shapes.whole, shapes.stream.bias),
            ),
            saved=None if self.output_gate or self.indexer else self.scores.saved(shapes),
        )

    def parameters(self, shapes: Shapes) -> Parameters:
        """Norm, projection to queries, keys and values, and the projection back.

        Shoeybi et al. 2019, §3, for the division by tensor parallelism; Ainslie et al. 2023, §2, for fewer
        key and value heads than query heads.
        """
        stream = shapes.stream
        h, both = stream.hidden, self.projected
        head_norms = 2 * self.head_dim if self.qk_norm else 0
        indexer = 0 if self.indexer is None else self.indexer.parameters(shapes, h)
        return Parameters(
            shared=h * both + self.query * h + (both if self.qkv_bias else 0),
            replicated=stream.norm_parameters + head_norms + (h if stream.bias else 0) + indexer,
        )

    def tensors(self, shapes: Shapes) -> list[Held]:
        """13 s b h + 5 a s² b with dropout in 16 bits (Korthikanti et al. 2022, §4.1)."""
        query, key = shapes.divided(self.query), shapes.divided(self.key)
        held = [
            *half_norms(shapes, "attention's norm"),
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
        if self.indexer is not None:
            held += self.indexer.tensors(shapes, self.sees.window or shapes.sequence)
        return held + dropout_tensors(shapes, "attention's dropout mask")

    def workspace(self, shapes: Shapes) -> int:
        """Most memory in addition to kept tensors, in I or B."""
        query = shapes.divided(self.query)
        h, whole = shapes.stream.hidden, shapes.whole
        # I holds most when it has computed its gradients and released nothing: the gradients of the residual
        # stream, of the heads' output, and of queries, keys and values. With plain attention, the last three
        # exist twice for a moment, together with the scores and their gradient.
        projected = shapes.divided(self.projected)
        gradients = whole + query + projected
        if not self.flash:
            gradients += projected + 2 * self.scores.bytes(shapes)
        # B also computes the gradients of weights. For the projection back, everything that F kept is still
        # there. For the first projection, queries, keys and values (whose gradients are as large) and the
        # input of the projection back are released.
        back = whole + query + shapes.weight(self.query, h)
        first = shapes.weight(h, self.projected) + whole + shapes.hidden - query
        return max(gradients, back, first)


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
