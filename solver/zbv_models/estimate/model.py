"""A model: the section ``model`` of a configuration; :mod:`zbv_models.estimate.model_rules` has its rules."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field, WithJsonSchema
from zbv_solver.errors import did_you_mean

from zbv_models.estimate.sections import ConfigSection, Count, Flag, Rate, Size
from zbv_models.estimate.shapes import Stream
from zbv_models.estimate.state_space import GivenCosts

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
LAYER = r"[BMWI*Ea-z-]|\([MWI*a-z][Ea-z-]\)"
Word = Annotated[str, Field(strict=True, max_length=200)]
Pattern = Annotated[str, Field(strict=True, pattern=rf"^(?:{LAYER})+$")]
"""A layer per letter, or per pair of letters in parentheses; lower-case letters are those of variants."""


LAYERS = r"\d{1,6}(-\d{1,6})?"
FROZEN = ("all", "layers", "embedding", "head", "predictions", "vision", "projector")
FORM = "a layer as in 3, or layers as in 0-15"


def _layer_word(word: str) -> str:
    if re.fullmatch(LAYERS, word) is None:
        raise ValueError(f"must be {FORM}")
    return word


def _frozen_word(word: str) -> str:
    if word not in FROZEN and re.fullmatch(LAYERS, word) is None:
        similar = did_you_mean(word, FROZEN)
        raise ValueError(f"not a part of a model.{similar} Use {', '.join(FROZEN)}, {FORM}")
    return word


LayerWord = Annotated[
    str,
    Field(strict=True),
    AfterValidator(_layer_word),
    WithJsonSchema({"type": "string", "pattern": f"^{LAYERS}$"}),
]
FrozenWord = Annotated[
    str,
    Field(strict=True),
    AfterValidator(_frozen_word),
    WithJsonSchema({"type": "string", "pattern": f"^({'|'.join(FROZEN)}|{LAYERS})$"}),
]
FrozenDtype = Literal["nf4"]
TargetModule = Literal[
    "all-linear", "attention", "mlp", "experts",
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "kv_proj", "o_a_proj", "o_b_proj", "g_proj",
    "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "linear_q_proj",
    "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj",
]  # fmt: skip
"""Matrices as transformers and Megatron-LM name them, and groups of them."""
TARGET_MODULES: tuple[str, ...] = get_args(TargetModule)


class Vision(ConfigSection):
    """A ViT in front of the model."""

    hidden: Size = Field(description="width of its residual stream")
    layers: Size = Field(description="its blocks")
    heads: Size = Field(description="its heads")
    ffn: Size | None = Field(None, description="width of its MLPs; null: 4 hidden")
    gated: Flag = Field(False, description="its MLPs have a gate")
    norm: Literal["layernorm", "rmsnorm"] = Field("layernorm", description="the two norms of a block")
    bias: Flag = Field(True, description="its linear layers have biases")
    positions: Literal["learned", "rotary", "both", "none"] = Field(
        "learned", description="of patches; both: learned ones and rotation"
    )
    patches: Size = Field(description="patches per image")
    position_table: Size | None = Field(
        None, description="rows of the table of learned positions; null: patches"
    )
    patch_values: Size = Field(588, description="values of a patch; 588 is 14 x 14 pixels in colour")
    merged: Size = Field(1, description="patches that become one token of the model")
    pooled: Flag = Field(False, description="merged patches are averaged; false: joined")
    projector: tuple[Size, ...] | None = Field(
        None, description="widths between the projector's matrices; null: one of the model's width"
    )
    projector_gated: Flag = Field(False, description="the projector's last matrix but one has a gate")
    projectors: Size = Field(1, description="projectors, of the last block and of others")
    window: Size | None = Field(
        None, description="patches of a piece of the image, within which patches attend; null: all"
    )
    full_attention: tuple[Count, ...] = Field(
        (), description="blocks that attend to all patches in spite of a window, counted from 0"
    )
    images: Size = Field(1, description="images per sequence")

    @property
    def ffn_width(self) -> int:
        """Width of the MLP between its matrices."""
        return 4 * self.hidden if self.ffn is None else self.ffn


class Compressed(ConfigSection):
    """Compressed attention (DeepSeek-AI 2026, DeepSeek-V4, §2.3): a window of tokens, and compressed ones.

    All heads share one vector per token, which is key and value. ``hidden``, ``heads``, ``head_dim`` and
    ``window`` are those of the model.
    """

    query_rank: Size = Field(description="width of the queries' latent vector")
    output_groups: Size = Field(description="groups of heads that are projected back apart")
    output_rank: Size = Field(description="width of what each group is projected to first")
    ratio: Size | None = Field(None, description="tokens that become one; null: the window alone")
    chosen: Size | None = Field(
        None, description="compressed tokens that the indexer chooses for a query; null: all of them"
    )


class Origin(ConfigSection):
    """What the estimate does not use of a file of transformers, and whose modules were measured instead."""

    model_type: Word = Field(description="the type that the file has")
    measured: Word | None = Field(
        None, description="the class of transformers, and its version, whose modules were measured"
    )
    text_alone: Flag = Field(False, description="everything but the language model is left out")
    quantized: Word | None = Field(
        None, description="the type of the weights that the file is published with"
    )

    @property
    def text(self) -> str:
        """A sentence for everything that a reader must know."""
        of_text = f"Of {self.model_type}, this is the language model alone. " if self.text_alone else ""
        if self.quantized is not None:
            of_text += (
                f"The file is that of weights in {self.quantized}, which has no effect here: what parameters "
                f"take follows from precision, those of frozen blocks from frozen_dtype, and how products "
                f"are computed from product_dtype. "
            )
        if self.measured is None:
            return of_text
        return (
            f"{of_text}zbv has no formulas for {self.model_type}: its layers were counted in the module "
            f"tree of {self.measured}, and scale as the nearest known kinds do. "
        )


class Variant(ConfigSection):
    """Layers that differ from others of the model in their sizes; null: as those."""

    letter: Annotated[str, Field(strict=True, pattern="^[a-z]$")] = Field(description="its letter in pattern")
    like: Literal["M", "W", "I", "*", "-", "E"] = Field(description="the letter of pattern that it is like")
    heads: Size | None = None
    kv_heads: Size | None = None
    head_dim: Size | None = None
    value_dim: Size | None = None
    shared_values: Flag | None = None
    reads_keys: Flag | None = None
    window: Size | None = None
    compressed: Compressed | None = None
    ffn: Size | None = None
    experts: Size | None = None
    experts_per_token: Size | None = None
    expert_ffn: Size | None = None
    state_space: GivenCosts | None = None


class Transformer(ConfigSection):
    """A decoder-only transformer, and the size of its microbatches.

    Widths are those of the whole model, before tensor parallelism divides them (``parallel``).
    """

    hidden: Size = Field(description="width of the residual stream, h")
    layers: Size = Field(description="transformer blocks, L")
    heads: Size = Field(description="query heads, a")
    kv_heads: Size | None = Field(None, description="key and value heads; null: as many as query heads")
    head_dim: Size | None = Field(None, description="width of a head; null: hidden / heads")
    value_dim: Size | None = Field(None, description="width of a head's values; null: head_dim")
    shared_values: Flag = Field(False, description="values are the keys before their norm: one matrix")
    reads_keys: Flag = Field(False, description="keys and values are those of an earlier layer")
    q_lora_rank: Size | None = Field(
        None, description="latent attention: width of the queries' latent vector"
    )
    kv_lora_rank: Size | None = Field(None, description="latent attention: that of keys and values")
    qk_nope_head_dim: Size | None = Field(
        None, description="latent attention: width of a key without rotation"
    )
    qk_rope_head_dim: Count | None = Field(
        None, description="latent attention: width of a key's rotated part"
    )
    v_head_dim: Size | None = Field(None, description="latent attention: width of a head's values")
    window: Size | None = Field(None, description="tokens that a query attends to; null: all")
    chunked: Flag = Field(
        False, description="the window is a piece of the sequence, within which queries attend"
    )
    full_attention_every: Size | None = Field(
        None, description="every n-th block has no window; null: all blocks have it"
    )
    index_heads: Size | None = Field(
        None, description="heads of an indexer that chooses the tokens of the window; null: the nearest ones"
    )
    index_dim: Size | None = Field(None, description="width of a head of the indexer")
    index_pool: Size = Field(1, description="tokens that the indexer compares as one")
    output_gate: Flag = Field(
        False, description="a product with the block's input scales what attention gives"
    )
    head_gate: Flag = Field(False, description="the same with one value per head")
    compressed: Compressed | None = Field(None, description="compressed attention, with its sizes")
    ffn: Size | None = Field(None, description="width of the MLP between its matrices; null: 4 hidden")
    gated: Flag = Field(False, description="MLP with a gate: three matrices, as in SwiGLU")
    experts: Size | None = Field(None, description="routed experts of a block; null: blocks have an MLP")
    experts_per_token: Size | None = Field(None, description="experts that a token is sent to")
    expert_ffn: Size | None = Field(None, description="width of an expert between its matrices; null: ffn")
    expert_hidden: Size | None = Field(
        None, description="width of the latent vector that experts compute with; null: hidden"
    )
    shared_expert_ffn: Size | None = Field(
        None, description="width of all shared experts; null: there are none"
    )
    shared_expert_gate: Flag = Field(False, description="a product with the token scales their output")
    expert_nodes: Size | None = Field(None, description="most nodes that a token is sent to; null: no limit")
    capacity_factor: Rate | None = Field(
        None, description="factor of the balanced load that an expert computes; null: no token is dropped"
    )
    dense_layers: Count = Field(0, description="first blocks that have an MLP instead of experts")
    expert_every: Size = Field(1, description="every n-th block has experts, the others an MLP")
    pattern: Pattern | None = Field(
        None,
        description="a letter per layer: B block, M state space, * attention, W attention with the window, "
        "I with the indexer, - MLP, E experts; a block of two as in (WE)",
    )
    variants: tuple[Variant, ...] = Field((), description="layers of other sizes, by letters of pattern")
    state_space: GivenCosts | None = Field(None, description="costs of a layer M of the pattern")
    prediction_layers: Count = Field(0, description="modules of multi-token prediction")
    prediction_pattern: Pattern | None = Field(
        None, description="layers of such a module, as in pattern; null: one like the last"
    )
    vision: Vision | None = Field(None, description="vision encoder in front")
    layer_inputs: Size | None = Field(
        None, description="width of an input of every block per token, from a separate table; null: none"
    )
    layer_vocabulary: Size | None = Field(
        None, description="rows of that table, if these are not the vocabulary"
    )
    origin: Origin | None = Field(None, description="what is not used of a file of transformers")
    residual_sums: Size | None = Field(
        None, description="earlier sums of blocks that every half reads, on average; null: the stream alone"
    )
    residual_streams: Size = Field(1, description="residual streams, which hyper-connections mix")
    vocabulary: Size = Field(description="tokens of the vocabulary, as padded, V")
    tied_embeddings: Flag = Field(False, description="the head has the weights of the embedding")
    sequence: Size = Field(description="tokens per sequence, s")
    microbatch_size: Size = Field(1, description="sequences per microbatch, b")
    dtype: Literal["bfloat16", "float16", "float32"] = Field("bfloat16", description="type of activations")
    product_dtype: Literal["bfloat16", "float16", "float32", "fp8", "fp4"] | None = Field(
        None, description="type of the operands of the blocks' linear layers; null: as dtype"
    )
    attention: Literal["flash", "plain"] = Field(
        "flash",
        description="flash keeps no scores; plain keeps them, for softmax and the product with values",
    )
    causal: Flag = Field(True, description="flash leaves out the half of the scores that is masked")
    dropout: Flag = Field(
        False, description="dropout after embedding, attention and MLP, and of plain scores"
    )
    norm: Literal["layernorm", "rmsnorm"] = Field("layernorm", description="the two norms of a block")
    post_norms: Flag = Field(False, description="two more norms, of what attention and MLP give")
    bias: Flag = Field(True, description="linear layers of blocks have biases")
    qkv_bias: Flag | None = Field(None, description="that of queries, keys and values; null: as bias")
    qk_norm: Flag = Field(False, description="queries and keys are normalised per head")
    positions: Literal["learned", "rotary", "none"] = Field("learned", description="position embedding")
    fused_activation: Flag = Field(
        True, description="gate and activation are one kernel, which keeps its inputs alone"
    )

    fused_loss: Flag = Field(
        False, description="the loss is one kernel, which overwrites the logits with their gradient"
    )
    frozen: tuple[FrozenWord, ...] = Field(
        (),
        description="parts that do not train: all, layers or some of them as in 0-15, embedding, head, "
        "predictions, vision, projector; with lora_rank all of them, unless some are given",
    )
    frozen_dtype: FrozenDtype | None = Field(
        None, description="type in which frozen blocks keep their matrices; null: as precision says"
    )
    lora_rank: Size | None = Field(
        None, description="rank r of LoRA adapters in frozen layers; null: without adapters"
    )
    target_modules: tuple[TargetModule, ...] = Field(
        (), description="matrices with adapters, by their names or in groups; if none are given, all-linear"
    )
    layers_to_transform: tuple[LayerWord, ...] = Field(
        (), description="layers with adapters, as in 0-15; if none are given, all frozen ones"
    )

    @property
    def n_kv_heads(self) -> int:
        """Key and value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def width_of_head(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def ffn_width(self) -> int:
        """Width of the MLP between its matrices."""
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the projection to queries, keys and values has a bias."""
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def tokens(self) -> int:
        """Tokens per microbatch."""
        return self.sequence * self.microbatch_size

    @property
    def narrow_dtype(self) -> str | None:
        """The type of operands that are narrower than activations."""
        return None if self.product_dtype in DTYPE_BYTES else self.product_dtype

    @property
    def stream(self) -> Stream:
        """The residual stream."""
        norm_values = 2 if self.norm == "layernorm" else 1
        return Stream(
            self.hidden,
            self.dtype_bytes,
            norm_values,
            self.bias,
            self.dropout,
            self.narrow_dtype,
            self.post_norms,
        )

    @property
    def dtype_bytes(self) -> int:
        """Bytes per value of an activation."""
        return DTYPE_BYTES[self.dtype]

    def varied(self, letter: str) -> tuple[Transformer, str]:
        """The model with the sizes of the layers of a letter, and the letter that these are like."""
        for variant in self.variants:
            if variant.letter == letter:
                sizes = {key: getattr(variant, key) for key in Variant.model_fields}
                own = {key: size for key, size in sizes.items() if key in VARIED and size is not None}
                return self.model_copy(update=own), variant.like
        return self, letter

    def likes(self, letters: str) -> str:
        """Letters without those of variants."""
        return letters.translate({ord(each.letter): each.like for each in self.variants})

    @property
    def has_dense_mlp(self) -> bool:
        """Whether a layer has an MLP that is no expert."""
        return _has_dense_mlp(self)

    @property
    def kinds(self) -> tuple[str, ...]:
        """One or two letters of ``pattern`` per layer: a block has one for each half.

        Without a pattern, the last block of each ``expert_every`` has experts, as with Qwen's
        ``decoder_sparse_step``, and the last one of each ``full_attention_every`` has no window.
        """
        if self.pattern is None:
            return tuple(map(self._block, range(self.layers)))
        return self._read(self.pattern)

    @property
    def prediction_kinds(self) -> tuple[str, ...]:
        """The same for the layers of a module of multi-token prediction."""
        return self.kinds[-1:] if self.prediction_pattern is None else self._read(self.prediction_pattern)

    def _read(self, pattern: str) -> tuple[str, ...]:
        found = (each.strip("()") for each in re.findall(LAYER, pattern))
        return tuple(self._block(place) if letters == "B" else letters for place, letters in enumerate(found))

    def _block(self, place: int) -> str:
        every = self.full_attention_every
        is_full = self.window is None or (every is not None and (place + 1) % every == 0)
        sees = "*" if is_full else "W" if self.index_heads is None else "I"
        has_experts = (
            self.experts is not None and place >= self.dense_layers and (place + 1) % self.expert_every == 0
        )
        return sees + ("E" if has_experts else "-")


VARIED = frozenset(Variant.model_fields) - {"letter", "like"}


@lru_cache(maxsize=64)
def _has_dense_mlp(model: Transformer) -> bool:
    # A search of layouts asks this of one model thousands of times.
    return any("-" in model.likes(kind) for kind in (*model.kinds, *model.prediction_kinds))
