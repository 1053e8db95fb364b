"""A model: the section ``model`` of a configuration, and the rules between its numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field
from zbv_solver.documents.validation import quoted
from zbv_solver.errors import Issue

from zbv_models.estimate.sections import ConfigSection, Count, Flag, Rate, Size
from zbv_models.estimate.shapes import Degrees, Stream
from zbv_models.estimate.state_space import GivenCosts

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
LAYER = r"[BMWI*E-]|\([MWI*][E-]\)"
Pattern = Annotated[str, Field(strict=True, pattern=rf"^(?:{LAYER})+$")]
"""A layer per letter, or per pair of letters in parentheses."""


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


class Transformer(ConfigSection):
    """A decoder-only transformer, and the size of its microbatches.

    Widths are those of the whole model, before tensor parallelism divides them (``parallel``).
    """

    hidden: Size = Field(description="width of the residual stream, h")
    layers: Size = Field(description="transformer blocks, L")
    heads: Size = Field(description="query heads, a")
    kv_heads: Size | None = Field(None, description="key and value heads; null: as many as query heads")
    head_dim: Size | None = Field(None, description="width of a head; null: hidden / heads")
    q_lora_rank: Size | None = Field(
        None, description="latent attention: width of the queries' latent vector"
    )
    kv_lora_rank: Size | None = Field(None, description="latent attention: that of keys and values")
    qk_nope_head_dim: Size | None = Field(
        None, description="latent attention: width of a key without rotation"
    )
    qk_rope_head_dim: Size | None = Field(None, description="latent attention: width of a key's rotated part")
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
    output_gate: Flag = Field(
        False, description="a product with the block's input scales what attention gives"
    )
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
    state_space: GivenCosts | None = Field(None, description="costs of a layer M of the pattern")
    prediction_layers: Count = Field(0, description="modules of multi-token prediction")
    prediction_pattern: Pattern | None = Field(
        None, description="layers of such a module, as in pattern; null: one like the last"
    )
    vision: Vision | None = Field(None, description="vision encoder in front")
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


@lru_cache(maxsize=64)
def _has_dense_mlp(model: Transformer) -> bool:
    # A search of layouts asks this of one model thousands of times.
    return any("-" in kind for kind in (*model.kinds, *model.prediction_kinds))


LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
OF_EXPERTS = (
    *("experts_per_token", "expert_ffn", "expert_hidden", "shared_expert_ffn", "expert_nodes"),
    "capacity_factor",
)


def model_issues(model: Transformer) -> Iterator[Issue]:
    """One issue per broken rule between the numbers of a model."""
    letters = "".join((*model.kinds, *model.prediction_kinds))
    latent = model.kv_lora_rank is not None
    needed = [(key, "latent attention (kv_lora_rank) needs it") for key in LATENT if latent]
    pairs = (("index_heads", "index_dim"), ("index_dim", "index_heads"))
    needed += [(key, f"{other} needs it") for key, other in pairs if getattr(model, other) is not None]
    if model.experts is not None:
        needed.append(("experts_per_token", "a model with experts needs it: how many a token is sent to"))
    for letter, key in (("M", "state_space"), ("E", "experts"), ("W", "window"), ("I", "index_heads")):
        if letter in letters:
            needed.append((key, f"layers {letter} of the pattern need it"))
    for key, why in needed:
        if getattr(model, key) is None:
            yield Issue(f"/model/{key}", f"this key is absent, and {why}.")
    for absent, keys, what in (
        (not latent, ("q_lora_rank", *LATENT), "latent attention. Give kv_lora_rank, too"),
        (model.window is None, ("full_attention_every", "index_heads", "chunked"),
         "a window. Give window, the tokens that a query attends to"),
        (model.experts is None, OF_EXPERTS, "a mixture of experts. Give experts, their number"),
    ):  # fmt: skip
        for key in keys:
            if absent and (value := getattr(model, key)):
                found = f"found {str(value).lower()}; it belongs to {what}, or remove it."
                yield Issue(f"/model/{key}", found)
    if model.head_dim is None and not latent and model.hidden % model.heads:
        rule = f"must divide hidden ({model.hidden}). Or give head_dim, their width."
        yield Issue("/model/heads", f"found {model.heads}; {rule}")
    if model.heads % model.n_kv_heads:
        rule = f"must divide heads ({model.heads}): each serves as many of them."
        yield Issue("/model/kv_heads", f"found {model.kv_heads}; {rule}")
    if latent and model.output_gate:
        yield Issue("/model/output_gate", "found true; latent attention has no gate. Remove it.")
    if model.experts is not None and (model.experts_per_token or 0) > model.experts:
        rule = f"must be at most experts ({model.experts})."
        yield Issue("/model/experts_per_token", f"found {model.experts_per_token}; {rule}")
    if model.experts is not None and model.dense_layers >= model.layers:
        rule = f"must be less than layers ({model.layers}), or no block has experts. Remove experts."
        yield Issue("/model/dense_layers", f"found {model.dense_layers}; {rule}")
    if model.pattern is not None and len(model.kinds) != model.layers:
        rule = f"must have one for each of the layers ({model.layers})."
        yield Issue("/model/pattern", f"found {len(model.kinds)} layers; {rule}")
    if model.state_space is not None and "M" not in letters:
        rule = "pattern says which layers it is. Give pattern, or remove it."
        yield Issue("/model/state_space", f"found costs without a layer M; {rule}")
    if model.vision is not None:
        yield from _vision_issues(model.vision)


def degree_issues(model: Transformer, degrees: Degrees) -> Iterator[Issue]:
    """One issue per degree of parallelism that does not divide what it shares."""
    yield from _tensor_issues(model, degrees)
    yield from _context_issues(model, degrees)
    yield from _expert_parallel_issues(model, degrees)


def fits(model: Transformer, degrees: Degrees) -> bool:
    """Whether the degrees divide what they share."""
    return next(degree_issues(model, degrees), None) is None


def _vision_issues(vision: Vision) -> Iterator[Issue]:
    if vision.hidden % vision.heads:
        yield Issue("/model/vision/heads", f"found {vision.heads}; must divide its hidden ({vision.hidden}).")
    places = vision.full_attention
    if places and vision.window is None:
        rule = "it belongs to a window. Give window, the patches of a piece, or remove it."
        yield Issue("/model/vision/full_attention", f"found {quoted(list(places))}; {rule}")
    elif any(place >= vision.layers for place in places):
        rule = f"must be below the encoder's layers ({vision.layers})."
        yield Issue("/model/vision/full_attention", f"found {max(places)}; {rule}")
    if vision.projector_gated and vision.projector == ():
        rule = "a projector of one matrix has no gate. Give the widths of projector, or remove it."
        yield Issue("/model/vision/projector_gated", f"found true; {rule}")


def _tensor_issues(model: Transformer, degrees: Degrees) -> Iterator[Issue]:
    degree = degrees.tensor
    divided = {"heads": model.heads}
    if model.kv_lora_rank is None:
        divided["kv_heads"] = model.n_kv_heads
    if model.has_dense_mlp:
        divided["ffn"] = model.ffn_width
    if model.shared_expert_ffn is not None:
        divided["shared_expert_ffn"] = model.shared_expert_ffn
    divided["vocabulary"] = model.vocabulary
    if degrees.sequence_parallel:
        divided["sequence"] = model.sequence
    if model.vision is not None:
        divided["the heads of vision"] = model.vision.heads
        divided["the ffn of vision"] = model.vision.ffn_width
    for name, size in divided.items():
        if size % degree:
            padded = f" Pad it to {-(-size // degree) * degree}." if name == "vocabulary" else ""
            rule = f"found {degree}; must divide {name} ({size}).{padded}"
            yield Issue("/parallel/tensor_parallel", rule)
    if model.experts is not None and degree > 1 and not degrees.sequence_parallel:
        detail = (
            f"found false; with experts and tensor_parallel {degree}, each device sends its own tokens to "
            f"experts, which needs sequence parallelism."
        )
        yield Issue("/parallel/sequence_parallel", detail)


def _context_issues(model: Transformer, degrees: Degrees) -> Iterator[Issue]:
    degree = degrees.context
    if degree == 1:
        return
    pieces = 2 * degree * (degrees.tensor if degrees.sequence_parallel else 1)
    if model.sequence % pieces:
        rule = (
            f"each device has two pieces of a sequence, so {pieces} must divide sequence ({model.sequence})."
        )
        yield Issue("/parallel/context_parallel", f"found {degree}; {rule}")
    if model.attention == "plain":
        rule = "plain attention has no context parallelism. Use flash."
        yield Issue("/parallel/context_parallel", f"found {degree}; {rule}")


def _expert_parallel_issues(model: Transformer, degrees: Degrees) -> Iterator[Issue]:
    degree, inside = degrees.expert, degrees.expert_in_node
    if degree % inside:
        rule = f"must divide expert_parallel ({degree})."
        yield Issue("/parallel/expert_parallel_in_node", f"found {inside}; {rule}")
    if degree == 1:
        return
    if model.experts is None:
        yield Issue("/parallel/expert_parallel", f"found {degree}; the model has no experts. Remove it.")
        return
    if model.experts % degree:
        yield Issue("/parallel/expert_parallel", f"found {degree}; must divide experts ({model.experts}).")
    devices = degrees.tensor * degrees.context * degrees.data
    if devices % degree:
        rule = f"must divide the devices of a rank, tensor x context x data parallel ({devices})."
        yield Issue("/parallel/expert_parallel", f"found {degree}; {rule}")
