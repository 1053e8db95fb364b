"""What trains: frozen parts of a model, and LoRA adapters of their matrices.

A frozen matrix has no W, no gradient and no states of the optimizer. It has an I if a parameter below it
trains, because that one's gradient passes through it. Where nothing below trains, there is no I either, and
nothing is kept for one. LoRA (Hu et al. 2021, arXiv 2106.09685, §4.1) adds B A x to W x, with A of r x n_in
and B of n_out x r, and trains these two alone. QLoRA (Dettmers et al. 2023,
arXiv 2305.14314, §3) keeps frozen matrices in 4 bits, and makes the values of a matrix before each product.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from zbv_models.estimate.model import Transformer
from zbv_models.estimate.part import ALL_LINEAR, Exchange, Held, Matrix, Part, Product, gradient
from zbv_models.estimate.shapes import Parameters, PerAction, Shapes

FROZEN_BYTES = {"nf4": (4 + 8 / 64 + 32 / (64 * 256)) / 8}
"""Bytes of a value of a frozen matrix, by its type.

NF4 has 4 bits, an 8-bit constant for each 64 values, and a 32-bit one for each 256 of these (Dettmers et al.
2023, §3, double quantization).
"""
PARTS = ("embedding", "head", "predictions", "vision", "projector")
"""Parts of a model besides its blocks that may be frozen, by their words."""


class WholePart(Protocol):
    """A kind of part: half a block, or an end of the model."""

    def part(self, shapes: Shapes) -> Part:
        """Costs and memory on one device."""
        ...


@dataclass(frozen=True)
class Lora:
    """Adapters of all frozen blocks."""

    rank: int
    """r."""
    modules: tuple[str, ...]
    """Names of the matrices that have them, or of groups of matrices."""

    def adapts(self, matrix: Matrix) -> bool:
        """Whether a matrix has an adapter."""
        return not set(self.modules).isdisjoint(matrix.names)

    def added_to(self, part: Part, shapes: Shapes) -> Part:
        """A frozen part with its adapters.

        F reads what the matrix and B give, and writes their sum; I does the same with gradients of the input.
        Dropout and scaling of PEFT are left out.
        """
        for matrix in filter(self.adapts, part.matrices):
            product, name = matrix.product, matrix.names[0]
            rows, groups = product.rows, product.groups
            down = Product(rows, product.n_in, self.rank, groups, is_narrow=False)
            up = Product(rows, self.rank, product.n_out, groups, is_narrow=False)
            size = shapes.stream.dtype_bytes * rows * groups
            latent = int(size * self.rank)
            part = replace(
                part,
                parameters=part.parameters + self._parameters(matrix, part, shapes),
                products=(*part.products, down, up),
                tensors=(
                    *part.tensors,
                    Held(f"what A of {name} gives", latent, after_input=True),
                    gradient(f"gradient of what A of {name} gives", latent),
                ),
                streamed=part.streamed + PerAction(3 * size * product.n_out, 3 * size * product.n_in),
                # The gradients of the input from both, and their sum.
                workspace=max(part.workspace, shapes.whole + 3 * int(size * product.n_in)),
            )
        return part

    def _parameters(self, matrix: Matrix, part: Part, shapes: Shapes) -> Parameters:
        """Those of A and B: each is divided as the matrix is, if it has that side."""
        product, tensor = matrix.product, shapes.tensor
        down, up = self.rank * product.n_in * product.groups, self.rank * product.n_out * product.groups
        if matrix.divided == "experts":
            count, of = (down + up) * shapes.degrees.expert, part.parameters
            return Parameters(experts=count, chosen=count * of.chosen // of.experts)
        if matrix.divided == "groups":
            return Parameters(shared=(down + up) * tensor)
        if matrix.divided == "columns":
            return Parameters(shared=up * tensor, replicated=down)
        if matrix.divided == "rows":
            return Parameters(shared=down * tensor, replicated=up)
        return Parameters(replicated=down + up)


@dataclass(frozen=True)
class Frozen:
    """Which parts of a model are frozen."""

    parts: frozenset[str] = frozenset()
    """Of :data:`PARTS`."""
    blocks: frozenset[int] = frozenset()
    """By their places, from 0."""
    lora: Lora | None = None
    adapted: frozenset[int] = frozenset()
    """Of the blocks, those with adapters."""

    @classmethod
    def of(cls, model: Transformer) -> Frozen:
        """Those of a model; with LoRA all, unless it names some."""
        parts, blocks = set[str](), set[int]()
        for word in model.frozen or (("all",) if model.lora_rank is not None else ()):
            parts |= set(PARTS if word == "all" else (word,)) & set(PARTS)
            blocks |= set(places(word, model.layers))
        lora = (
            None if model.lora_rank is None else Lora(model.lora_rank, model.target_modules or (ALL_LINEAR,))
        )
        adapted = set(blocks) if lora is not None else set[int]()
        if model.layers_to_transform:
            adapted &= {place for word in model.layers_to_transform for place in places(word, model.layers)}
        return cls(frozenset(parts), frozenset(blocks), lora, frozenset(adapted))


def places(word: str, layers: int) -> range:
    """The blocks that a word of ``frozen`` names: ``all``, ``layers``, a place, or the first and the last."""
    if word in ("all", "layers"):
        return range(layers)
    if not word[0].isdigit():
        return range(0)
    first, _, last = word.partition("-")
    return range(int(first), int(last or first) + 1)


@dataclass(frozen=True)
class FrozenPart:
    """A part whose own parameters are frozen."""

    half: WholePart
    is_differentiated: bool
    """Whether an adapter of its layer, or a parameter below that, trains."""
    lora: Lora | None = None
    dtype: str | None = None
    """The type of its matrices, a key of :data:`FROZEN_BYTES`; None: that of other parameters."""

    def part(self, shapes: Shapes) -> Part:
        """Costs and memory on one device."""
        part = self.half.part(replace(shapes, is_frozen=True))
        part = replace(part, frozen=part.parameters)
        if self.dtype is not None and part.matrices:
            part = _unpacking(part, FROZEN_BYTES[self.dtype], shapes.stream.dtype_bytes)
        if not self.is_differentiated:
            return _without_backward(part)
        lora = self.lora
        adapted = [] if lora is None else [each for each in part.matrices if lora.adapts(each)]
        part = replace(
            part,
            products=tuple(replace(each, has_weight_gradient=False) for each in part.products),
            tensors=_kept(part.tensors, adapted),
            moved=replace(part.moved, backward_weight=0.0),
            streamed=replace(part.streamed, backward_weight=0.0),
        )
        if not any(each.divided == "columns" for each in adapted):  # W gathers the input of these again
            part = replace(
                part, exchanges=tuple(_without(each, "backward_weight") for each in part.exchanges)
            )
        return part if lora is None else lora.added_to(part, shapes)


def _unpacking(part: Part, size: float, dtype_bytes: int) -> Part:
    """A part that makes the values of a matrix before each product, one matrix at a time.

    Norms, biases and routers count like the matrices: they are less than a hundredth of a block.
    """
    matrices = [each.product for each in part.matrices if ALL_LINEAR in each.names]
    values = [each.n_in * each.n_out * each.groups for each in matrices]
    moved = sum(values) * (size + dtype_bytes)
    return replace(
        part,
        frozen_bytes=size,
        streamed=part.streamed + PerAction(moved, moved),
        workspace=part.workspace + dtype_bytes * max(values),
    )


def _kept(tensors: Iterable[Held], adapted: Iterable[Matrix]) -> tuple[Held, ...]:
    """What I needs, and what W of adapters needs: inputs of their matrices, and gradients of the outputs."""
    names, kept = {each.names[0] for each in adapted}, []
    for tensor in tensors:
        if not tensor.after_input or not names.isdisjoint(tensor.of):
            kept.append(tensor)
        elif tensor.for_input:
            kept.append(replace(tensor, after_input=False))
    return tuple(kept)


def _without(exchange: Exchange, *actions: str) -> Exchange:
    """An exchange that does not take place in some actions."""
    none = dict.fromkeys(actions, 0.0)
    sent, calls, steps = (replace(each, **none) for each in (exchange.sent, exchange.calls, exchange.steps))
    return Exchange(exchange.group, sent, calls, steps)


def _without_backward(part: Part) -> Part:
    """A part that only computes F: what F would keep for I and W exists while it runs, at most."""
    return replace(
        part,
        products=tuple(
            replace(each, has_input_gradient=False, has_weight_gradient=False) for each in part.products
        ),
        tensors=(),
        moved=PerAction(part.moved.forward),
        streamed=PerAction(part.streamed.forward),
        core=PerAction(part.core.forward),
        modules=(),
        exchanges=tuple(_without(each, "backward_input", "backward_weight") for each in part.exchanges),
        workspace=max(part.after_forward, part.workspace),
        is_differentiated=False,
    )
