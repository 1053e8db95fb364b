"""The sizes of a microbatch's tensors on one device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

INDEX_BYTES = 8
"""Size of a token index, and of a target."""
STATISTIC_BYTES = 4
"""Size of a norm's mean or deviation, of a softmax normaliser, and of a logit in the loss: float32."""
MASK_BYTES = 1
PRODUCT_BYTES = {None: 0.0, "fp8": 1.0, "fp4": 0.5}
"""Size of an operand of a matrix product; without the scales, which are less than a tenth of it."""


@dataclass(frozen=True)
class Stream:
    """The residual stream: the properties that all layers share.

    Attributes
    ----------
    hidden
        Width, h.
    dtype_bytes
        Size of a value, e.
    norm_values
        Parameters of a norm per value, and statistics per token: 2 for LayerNorm, 1 for RMSNorm.
    product_dtype
        Type of the operands of linear layers: ``fp8``, ``fp4``, or None for that of the stream.
    post_norms
        Whether each half of a block also has a norm of what it gives (Gemma Team 2024, Gemma 2, §2).
    """

    hidden: int
    dtype_bytes: int = 2
    norm_values: int = 1
    bias: bool = False
    dropout: bool = False
    product_dtype: str | None = None
    post_norms: bool = False

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
    """How many devices share what.

    Attributes
    ----------
    tensor
        Devices that share every layer, t.
    sequence_parallel
        Whether they divide norms and dropout, too, by sequence (Korthikanti et al. 2022, §4.2).
    context
        Devices that share every sequence, c (Liu et al. 2023; Grattafiori et al. 2024, §3.3.2).
    gathers_context
        Whether keys and values are gathered, instead of passed around a ring.
    expert
        Devices that share the experts of a layer, out of t · c · d devices; each expert is whole on a device.
    expert_in_node
        Devices of an expert-parallel group that are on one node.
    data
        Replicas of the pipeline, d.
    zero_stage
        What replicas share: optimizer states (1), also gradients (2), also parameters (3).
    keeps_gathered
        Whether a linear layer keeps the input that sequence parallelism gathered for it, as autograd does;
        otherwise it gathers the input again for W (Korthikanti et al. 2022, §4.2.2).
    wide_operands
        Whether a linear layer with narrow products keeps its operands in the type of activations, and casts
        them again in the backward, as torchao's does (``matmul_with_hp_or_float8_args``).
    """

    tensor: int = 1
    sequence_parallel: bool = False
    context: int = 1
    gathers_context: bool = False
    expert: int = 1
    expert_in_node: int = 1
    data: int = 1
    zero_stage: int = 0
    keeps_gathered: bool = False
    wide_operands: bool = False

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
    """Sizes of a microbatch's tensors on one device, in bytes.

    Attributes
    ----------
    sequence
        Tokens per sequence, s.
    sequences
        Sequences per microbatch, b.
    """

    stream: Stream
    sequence: int
    sequences: int = 1
    degrees: Degrees = Degrees()

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
        """The gradient of a matrix, which B computes before it is accumulated."""
        return self.stream.dtype_bytes * (n_in * n_out // self.tensor)

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
