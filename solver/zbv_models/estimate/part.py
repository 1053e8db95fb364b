"""A part of a layer on one device: what it computes, keeps, moves and exchanges.

Half a block is a part, and so are the ends of the model. Each kind of part has a file, which makes
:class:`Part` from sizes; :mod:`zbv_models.estimate.times` and :mod:`zbv_models.estimate.layers` do not know
the kinds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from zbv_models.estimate.shapes import NO_PARAMETERS, NONE, Parameters, PerAction, Shapes

ALL_LINEAR = "all-linear"
"""The group of all matrices that LoRA may adapt."""
Divided = Literal["rows", "columns", "groups", "experts"] | None
Group = Literal["tensor", "context", "expert", "expert_in_node"]


@dataclass(frozen=True)
class Held:
    """A tensor that is kept."""

    name: str
    bytes: int
    after_forward: bool = True
    after_input: bool = False
    """Whether it is kept after F, and after I."""
    modules: tuple[str, ...] = ()
    """The modules whose selective recomputation drops it."""
    is_input: bool = False
    """Whether it is the layer's input, which full recomputation keeps."""
    of: tuple[str, ...] = ()
    """If W needs it, the first names of the matrices (:class:`Matrix`) for which it does."""
    for_input: bool = False
    """If W needs it, whether I does, too, so that a frozen layer keeps it."""


def after_forward(tensors: Iterable[Held]) -> int:
    """Bytes that are kept after F."""
    return sum(tensor.bytes for tensor in tensors if tensor.after_forward)


def after_input(tensors: Iterable[Held]) -> int:
    """Bytes that are kept after I."""
    return sum(tensor.bytes for tensor in tensors if tensor.after_input)


def gradient(name: str, size: int, of: tuple[str, ...] = ()) -> Held:
    """A gradient that waits for W, of some matrices."""
    return Held(name, size, after_forward=False, after_input=True, of=of)


def norm_tensors(shapes: Shapes, name: str) -> list[Held]:
    """A norm keeps its input and statistics; it computes the gradient of its weight in I."""
    return [
        Held(f"input of {name}", shapes.hidden, is_input=True),
        Held(f"statistics of {name}", shapes.statistics * shapes.own_tokens),
    ]


def half_tensors(shapes: Shapes, name: str) -> list[Held]:
    """What the norms and the dropout of a half of a block keep: of its input, and of what it gives."""
    held = norm_tensors(shapes, f"{name}'s norm") + dropout_tensors(shapes, name)
    if shapes.stream.post_norms:
        last = norm_tensors(shapes, f"{name}'s last norm")
        held += (replace(tensor, is_input=False) for tensor in last)
    return held


def norm_module(shapes: Shapes) -> Module:
    """Selective recomputation of a norm: its output is dropped.

    Norms in front of latent attention and of experts are separate modules. In front of other attention
    and of a dense MLP, the norm is part of the product, and this repeats nothing (Megatron-LM,
    ``megatron/core/models/gpt/gpt_layer_specs.py``, and ``recompute_input_layernorm`` in
    ``megatron/core/transformer/transformer_layer.py``).
    """
    return Module("layernorm", moved=2.0 * shapes.hidden)


def dropout_tensors(shapes: Shapes, name: str) -> list[Held]:
    """The mask of a tensor as wide as the residual stream."""
    return [Held(f"{name}'s dropout mask", shapes.mask(shapes.hidden))] if shapes.stream.dropout else []


@dataclass(frozen=True)
class Product:
    """A linear layer on one device: a matrix product in each of F, I and W.

    Each has 2 · rows · n_in · n_out operations (Narayanan et al. 2021, §5.1; Qi et al. 2023, §2.3).
    """

    rows: float
    n_in: int
    n_out: int
    groups: int = 1
    """Products of this size that run as one kernel, as those of experts do."""
    is_narrow: bool = True
    """Whether it takes the narrow operands of ``Stream.product_dtype``."""
    has_input_gradient: bool = True
    has_weight_gradient: bool = True
    """Whether there is a product in I, and in W: not where parameters are frozen."""

    @property
    def flops(self) -> float:
        """Operations of each action that it has."""
        return 2.0 * self.rows * self.n_in * self.n_out * self.groups

    @property
    def of_actions(self) -> PerAction:
        """1 for every action that it has, 0 for the others."""
        return PerAction(1.0, float(self.has_input_gradient), float(self.has_weight_gradient))


@dataclass(frozen=True)
class Matrix:
    """A matrix of a block that LoRA may adapt."""

    names: tuple[str, ...]
    """Its own name in a part, first; those in transformers and Megatron-LM; and those of groups of matrices
    that it belongs to."""
    product: Product
    """Its product on one device."""
    divided: Divided = None
    """What parallelism divides: the matrix by its inputs (rows), by its outputs (columns), or the groups of
    heads or the experts that have one each."""


@dataclass(frozen=True)
class Linear:
    """A linear layer as torchtitan runs it, which is what its selective recomputation counts."""

    product: Product
    output_bytes: int
    """Size of its output on one device."""
    has_bias: bool = False
    """Whether it adds a bias, which makes it another operation (``addmm`` instead of ``mm``)."""


@dataclass(frozen=True)
class Exchange:
    """Collectives or transfers within a group of devices, for each action."""

    group: Group
    sent: PerAction
    """Bytes that a device sends."""
    calls: PerAction
    """Number of collectives, each of which has the link's latency."""
    steps: PerAction = NONE
    """Number of their steps around a ring, each of which has the link's latency of a step."""


@dataclass(frozen=True)
class Module:
    """A part of a part that selective recomputation repeats in I (Korthikanti et al. 2022, §5).

    The names, and what they repeat and drop, are those of Megatron-LM's ``--recompute-modules``.
    """

    name: str
    products: tuple[Product, ...] = ()
    """Linear layers that are computed again."""
    moved: float = 0.0
    """Bytes of memory traffic of F that is repeated."""
    has_core: bool = False
    """Whether attention's products of activations are repeated."""
    exchanges: tuple[Exchange, ...] = ()
    """Exchanges whose F is repeated."""
    within: str = ""
    """A module that repeats this one, too."""


@dataclass(frozen=True)
class Part:
    """Half a block, or an end of the model, on one device."""

    parameters: Parameters
    """Those of the whole model."""
    products: tuple[Product, ...]
    """Linear layers, on this device."""
    tensors: tuple[Held, ...]
    """Tensors that are kept."""
    moved: PerAction
    """Memory traffic of everything but matrix products, in bytes."""
    exchanges: tuple[Exchange, ...]
    workspace: int
    """Most bytes that an action needs in addition to kept tensors."""
    output_bytes: int
    """Size of the output, and of its gradient."""
    core: PerAction = NONE
    """Operations of attention's products of activations, on this device."""
    streamed: PerAction = NONE
    """The same of large tensors, which reaches more of the memory's bandwidth."""
    modules: tuple[Module, ...] = ()
    """What selective recomputation may repeat."""
    is_flash: bool = False
    """Whether flash attention computes the core."""
    is_misaligned: bool = False
    """Whether rows of the core's operands do not start at multiples of 16 bytes."""
    is_uneven: bool = False
    """Whether a head's keys and values differ in width."""
    is_scan: bool = False
    """Whether a scan over the sequence computes the core: a state space or linear attention."""
    is_routed: bool = False
    """Whether it sorts tokens by expert."""
    linears: tuple[Linear, ...] = ()
    """Its linear layers in torchtitan's order, without the router and routed experts."""
    saved: int | None = None
    """Bytes of other outputs that torchtitan's selective recomputation saves; None if torchtitan has no
    such part."""
    matrices: tuple[Matrix, ...] = ()
    """Those that LoRA may adapt."""
    frozen: Parameters = NO_PARAMETERS
    """Of the parameters, those that do not train."""
    frozen_bytes: float | None = None
    """Bytes of one of these, if they are not kept as other parameters."""
    is_differentiated: bool = True
    """Whether it has an I: not where neither it nor a part below it trains."""

    @property
    def trained(self) -> Parameters:
        """The parameters that train."""
        return self.parameters + self.frozen.scaled(-1)

    @cached_property
    def after_forward(self) -> int:
        """Bytes that are kept after F."""
        return after_forward(self.tensors)

    @cached_property
    def after_input(self) -> int:
        """Bytes that are kept after I."""
        return after_input(self.tensors)

    @cached_property
    def input_bytes(self) -> int:
        """Bytes that full recomputation keeps."""
        return after_forward(tensor for tensor in self.tensors if tensor.is_input)

    def dropped_bytes(self, modules: frozenset[str]) -> int:
        """Bytes that selective recomputation of some modules drops."""
        return after_forward(tensor for tensor in self.tensors if not modules.isdisjoint(tensor.modules))

    @cached_property
    def flops(self) -> PerAction:
        """Operations of all matrix products."""
        return sum((each.of_actions.scaled(each.flops) for each in self.products), self.core)


def group_sum(shapes: Shapes, passes: PerAction, calls: PerAction, width: int | None = None) -> Exchange:
    """Ring collectives of a tensor-parallel group on tensors of a width, by default of the residual stream.

    In each ring pass a device sends (t - 1) / t of a tensor, in t - 1 steps. An all-reduce has two passes, an
    all-gather or a reduce-scatter one (Patarasuk and Yuan 2009, §3).
    """
    t = shapes.tensor
    whole = shapes.whole if width is None else shapes.stream.dtype_bytes * shapes.tokens * width
    sent, steps = passes.scaled(whole * (t - 1) / t), passes.scaled(t - 1)
    return Exchange("tensor", sent, calls if t > 1 else NONE, steps)


def half_exchange(shapes: Shapes) -> Exchange:
    """The tensor-parallel collectives of attention, and of an MLP.

    An all-reduce in F and one in I (Shoeybi et al. 2019, §3); with sequence parallelism an all-gather and a
    reduce-scatter in each, and one more all-gather of the first matrix's input, here before W (Korthikanti et
    al. 2022, §4.2.2), unless that was kept.
    """
    if shapes.degrees.sequence_parallel:
        again = 0 if shapes.degrees.keeps_gathered else 1
        return group_sum(shapes, PerAction(2, 2, again), PerAction(2, 2, again))
    return group_sum(shapes, PerAction(2, 2, 0), PerAction(1, 1, 0))


def around(shapes: Shapes) -> PerAction:
    """Memory traffic of a half's norm, dropout and residual sum: read and written once each.

    They are bound by memory, not by arithmetic (Ivanov et al. 2021, §4).
    """
    hidden, more = shapes.hidden, shapes.stream.norms - 1
    norms = PerAction(2 * more * hidden, 3 * more * hidden)
    return PerAction(5 * hidden, 6 * hidden) + norms + dropout_traffic(shapes, hidden)


def dropout_traffic(shapes: Shapes, of: int) -> PerAction:
    """Memory traffic of dropout of a tensor of the given size."""
    if not shapes.stream.dropout:
        return NONE
    moved = 2 * of + shapes.mask(of)
    return PerAction(moved, moved)
