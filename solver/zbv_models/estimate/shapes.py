"""Sizes: records of numbers, parameter counts, degrees of parallelism, and a microbatch's tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import add
from typing import Self


@dataclass(frozen=True)
class Summed:
    """Base class of records of numbers that are added field by field."""

    def __add__(self, other: Self) -> Self:
        # A search of layouts adds millions of records, and the constructor of a frozen record is slow.
        found = object.__new__(type(self))
        found.__dict__.update(
            zip(vars(self), map(add, vars(self).values(), vars(other).values()), strict=True)
        )
        return found

    def scaled(self, factor: float) -> Self:
        """All numbers multiplied by a factor."""
        return type(self)(*[value * factor for value in vars(self).values()])

    @property
    def total(self) -> float:
        """The sum of all numbers."""
        found: float = sum(vars(self).values())
        return found


@dataclass(frozen=True)
class PerAction(Summed):
    """One number for each of F, I and W."""

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0


NONE = PerAction()
INDEX_BYTES = 8
"""Size of a token index, and of a target."""
STATISTIC_BYTES = 4
"""Size of a norm's mean or deviation, of a softmax normaliser, and of a logit in the loss: float32."""
MASK_BYTES = 1
PRODUCT_BYTES = {None: 0.0, "fp8": 1.0, "fp4": 0.5}
"""Size of an operand of a matrix product; without the scales, which are less than a tenth of it."""


@dataclass(frozen=True)
class Stream:
    """The residual stream: the properties that all layers share."""

    hidden: int
    """Width, h."""
    dtype_bytes: int = 2
    """Size of a value, e."""
    norm_values: int = 1
    """Parameters of a norm per value, and statistics per token: 2 for LayerNorm, 1 for RMSNorm."""
    bias: bool = False
    dropout: bool = False
    product_dtype: str | None = None
    """Type of the operands of linear layers: ``fp8``, ``fp4``, or None for that of the stream."""
    post_norms: bool = False
    """Whether each half of a block also has a norm of what it gives (Gemma Team 2024, Gemma 2, §2)."""

    @property
    def norms(self) -> int:
        """Norms of each half of a block."""
        return 2 if self.post_norms else 1

    @property
    def norm_parameters(self) -> int:
        """Parameters of the norms of each half of a block."""
        return self.norms * self.hidden * self.norm_values


@dataclass(frozen=True)
class Degrees:
    """How many devices share what."""

    tensor: int = 1
    """Devices that share every layer, t."""
    sequence_parallel: bool = False
    """Whether they divide norms and dropout, too, by sequence (Korthikanti et al. 2022, §4.2)."""
    context: int = 1
    """Devices that share every sequence, c (Liu et al. 2023; Grattafiori et al. 2024, §3.3.2)."""
    gathers_context: bool = False
    """Whether keys and values are gathered, instead of passed around a ring."""
    expert: int = 1
    """Devices that share the experts of a layer, out of t · c · d devices; each expert is whole on a
    device."""
    expert_in_node: int = 1
    """Devices of an expert-parallel group that are on one node."""
    data: int = 1
    """Replicas of the pipeline, d."""
    zero_stage: int = 0
    """What replicas share: optimizer states (1), also gradients (2), also parameters (3)."""
    keeps_gathered: bool = False
    """Whether a linear layer keeps the input that sequence parallelism gathered for it, as autograd does;
    otherwise it gathers the input again for W (Korthikanti et al. 2022, §4.2.2)."""
    wide_operands: bool = False
    """Whether a linear layer with narrow products keeps its operands in the type of activations, and casts
    them again in the backward, as torchao's does (``matmul_with_hp_or_float8_args``)."""

    @property
    def replicas(self) -> int:
        """Devices with the same parameters of all layers but experts."""
        return self.data * self.context

    @property
    def expert_replicas(self) -> int:
        """Devices with the same experts."""
        return max(1, self.tensor * self.context * self.data // self.expert)


@dataclass(frozen=True)
class Shapes:
    """Sizes of a microbatch's tensors on one device, in bytes."""

    stream: Stream
    sequence: int
    """Tokens per sequence, s."""
    sequences: int = 1
    """Sequences per microbatch, b."""
    degrees: Degrees = Degrees()
    is_frozen: bool = False
    """Whether no action computes gradients of matrices."""

    @cached_property
    def tokens(self) -> int:
        """Tokens of a tensor-parallel group: s b / c."""
        return self.sequence * self.sequences // self.degrees.context

    @cached_property
    def own_tokens(self) -> int:
        """Tokens for which a device computes norms and dropout, and which it sends to experts."""
        return self.tokens // (self.tensor if self.degrees.sequence_parallel else 1)

    @property
    def tensor(self) -> int:
        """Devices of a tensor-parallel group, t."""
        return self.degrees.tensor

    @cached_property
    def hidden(self) -> int:
        """A tensor as wide as the residual stream, outside the parts that tensor parallelism divides."""
        return self.stream.dtype_bytes * self.own_tokens * self.stream.hidden

    @property
    def kept_input(self) -> int:
        """What a linear layer keeps of its input, which is as wide as the residual stream."""
        return self.whole if self.degrees.keeps_gathered else self.hidden

    @cached_property
    def whole(self) -> int:
        """The same for all tokens of the group."""
        return self.stream.dtype_bytes * self.tokens * self.stream.hidden

    def divided(self, width: int) -> int:
        """A tensor of a given width that tensor parallelism divides."""
        return self.stream.dtype_bytes * self.tokens * width // self.tensor

    def own(self, width: int) -> int:
        """A tensor of a given width for the tokens of this device."""
        return self.stream.dtype_bytes * self.own_tokens * width

    @property
    def positions(self) -> int:
        """The added position embeddings: a sequence as wide as the residual stream."""
        return self.stream.dtype_bytes * self.sequence * self.stream.hidden // self.degrees.context

    def weight(self, n_in: int, n_out: int) -> int:
        """The gradient of a matrix, which B computes before it is accumulated; 0 if it is frozen."""
        return 0 if self.is_frozen else self.stream.dtype_bytes * (n_in * n_out // self.tensor)

    def mask(self, of: int) -> int:
        """The dropout mask of a tensor of the given size."""
        return of // self.stream.dtype_bytes * MASK_BYTES

    @property
    def keeps_narrow(self) -> bool:
        """Whether linear layers keep narrow operands."""
        return self.stream.product_dtype is not None and not self.degrees.wide_operands

    def operand(self, size: int) -> int:
        """Size of a tensor that is kept only as the operand of a linear layer's products."""
        if not self.keeps_narrow:
            return size
        return int(size // self.stream.dtype_bytes * PRODUCT_BYTES[self.stream.product_dtype])

    @property
    def statistics(self) -> int:
        """Statistics of a norm, per token."""
        return STATISTIC_BYTES * self.stream.norm_values


@dataclass(frozen=True)
class Parameters(Summed):
    """A parameter count, split by how parallelism treats the parameters."""

    shared: int = 0
    """Parameters of matrices that a tensor-parallel group divides."""
    replicated: int = 0
    """Parameters that every device has whole: norms, positions, biases after a sum over the group,
    routers."""
    experts: int = 0
    """Parameters of routed experts, which an expert-parallel group divides."""
    chosen: int = 0
    """Parameters of the routed experts that one token uses."""
    tables: int = 0
    """Those of ``shared`` that are tables of the vocabulary: embedding and output."""

    @property
    def total(self) -> int:
        """Count in the whole model."""
        return self.shared + self.replicated + self.experts

    @property
    def active(self) -> int:
        """Count of those that one token uses."""
        return self.shared + self.replicated + self.chosen

    def dense_on(self, degrees: Degrees) -> int:
        """Count on a device, without routed experts."""
        return self.shared // degrees.tensor + self.replicated

    def experts_on(self, degrees: Degrees) -> int:
        """Count of routed experts' parameters on a device."""
        return self.experts // degrees.expert

    def on_device(self, degrees: Degrees) -> int:
        """Count on each device."""
        return self.dense_on(degrees) + self.experts_on(degrees)


NO_PARAMETERS = Parameters()
