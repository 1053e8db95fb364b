"""What the types of models of transformers are, as tables: what their configurations do not say.

The sources are the modeling files of transformers 5 (``models/TYPE/modeling_TYPE.py``); for ``kimi_k2``,
``kimi_vl`` and ``mimo`` the files in their repositories.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Section = dict[str, Any]
Window = Literal["all", "alternate", "switch"]


@dataclass(frozen=True)
class TextKind:
    """A type of language model.

    Attributes
    ----------
    model
        Values of the section ``model`` that are not those of Llama: RMSNorm, a gate, rotary positions, no
        biases.
    window
        Which blocks have the window: ``all``, ``alternate`` (all but every n-th; ``full_every``), ``switch``
        (with ``use_sliding_window``, those from ``max_window_layers``), or none.
    linear
        Whether the blocks that are not full attention are gated delta nets.
    chunked
        Whether the window is a piece of the sequence.
    halves
        Whether a layer is half a block.
    full_every
        Every n-th block attends to all tokens, unless the file says so.
    expert_width, dense_width
        The keys of the widths of experts, and of MLPs.
    shared_experts
        Shared experts that the file does not count.
    defaults
        The type whose defaults it has, if these are not its own.
    computed
        Defaults that transformers computes.
    """

    model: Section = field(default_factory=dict)
    window: Window | None = None
    linear: bool = False
    chunked: bool = False
    halves: bool = False
    full_every: int | None = None
    expert_width: str = "moe_intermediate_size"
    dense_width: str = "intermediate_size"
    shared_experts: int = 0
    defaults: str = ""
    computed: Section = field(default_factory=dict)


PLAIN: Section = {"bias": False, "qkv_bias": False}
QWEN2: Section = {"bias": False, "qkv_bias": True}
QWEN3: Section = {"qk_norm": True}
GPT: Section = {"gated": False, "norm": "layernorm", "bias": True, "qkv_bias": True}
GEMMA2: Section = {"post_norms": True}
GEMMA3: Section = {"post_norms": True, "qk_norm": True}
GLM: Section = {"bias": False}
GLM4: Section = {"bias": False, "post_norms": True}
GATED: Section = {"qk_norm": True, "output_gate": True, "shared_expert_gate": True}
LATENT: Section = {"bias": False, "qkv_bias": False}
ALL: Window = "all"
ALTERNATE: Window = "alternate"
SWITCH: Window = "switch"

TEXT_KINDS: Mapping[str, TextKind] = {
    "arcee": TextKind({"gated": False}),
    "bloom": TextKind({**GPT, "positions": "none"}),
    "cohere": TextKind(),
    "cohere2": TextKind(window=ALTERNATE, full_every=4),
    "deepseek_v2": TextKind(LATENT),
    "deepseek_v3": TextKind(LATENT),
    "deepseek_v32": TextKind(LATENT),
    "dots1": TextKind(QWEN3, window=SWITCH),
    "ernie4_5": TextKind(),
    "exaone4": TextKind(QWEN3, window=ALTERNATE, full_every=4),
    "gemma": TextKind(),
    "gemma2": TextKind(GEMMA2, window=ALTERNATE, full_every=2),
    "gemma3_text": TextKind(GEMMA3, window=ALTERNATE, full_every=6),
    "glm": TextKind(GLM),
    "glm4": TextKind(GLM4),
    "glm4_moe": TextKind(GLM),
    "glm4_moe_lite": TextKind(LATENT, computed={"first_k_dense_replace": 1}),
    "glm4v_moe_text": TextKind(GLM),
    "glm4v_text": TextKind({**GLM4, "qkv_bias": True}),
    "glm_moe_dsa": TextKind(LATENT),
    "gpt2": TextKind({**GPT, "positions": "learned"}),
    "gpt_neox": TextKind(GPT),
    "gpt_oss": TextKind({"bias": True}, window=ALTERNATE, full_every=2, expert_width="intermediate_size"),
    "granite": TextKind(),
    "kimi_k2": TextKind(LATENT, defaults="deepseek_v3"),
    "llama": TextKind(),
    "llama4_text": TextKind(
        window=ALTERNATE,
        chunked=True,
        full_every=4,
        expert_width="intermediate_size",
        dense_width="intermediate_size_mlp",
        shared_experts=1,
    ),
    "mimo": TextKind({"bias": False}, window=SWITCH, defaults="qwen2"),
    "minimax_m2": TextKind({**PLAIN, **QWEN3}, expert_width="intermediate_size"),
    "ministral": TextKind(PLAIN, window=ALL),
    "ministral3": TextKind(PLAIN, window=ALL),
    "mistral": TextKind(PLAIN, window=ALL),
    "mixtral": TextKind(PLAIN, window=ALL, expert_width="intermediate_size"),
    "nemotron": TextKind({"gated": False, "norm": "layernorm"}),
    "nemotron_h": TextKind({"gated": False, "positions": "none"}, window=ALL, halves=True),
    "olmo2": TextKind(QWEN3),
    "olmo3": TextKind(QWEN3, window=ALTERNATE, full_every=4),
    "olmoe": TextKind(QWEN3, expert_width="intermediate_size"),
    "phi": TextKind(GPT),
    "phi3": TextKind(PLAIN, window=ALL),
    "qwen2": TextKind(QWEN2, window=SWITCH),
    "qwen2_5_vl_text": TextKind(QWEN2, window=SWITCH),
    "qwen2_moe": TextKind({**QWEN2, "shared_expert_gate": True}, window=SWITCH),
    "qwen2_vl_text": TextKind(QWEN2, window=SWITCH),
    "qwen3": TextKind(QWEN3, window=SWITCH),
    "qwen3_5_moe_text": TextKind(GATED, linear=True, full_every=4),
    "qwen3_5_text": TextKind(GATED, linear=True, full_every=4),
    "qwen3_moe": TextKind(QWEN3, window=SWITCH),
    "qwen3_next": TextKind(GATED, linear=True, full_every=4),
    "qwen3_vl_moe_text": TextKind(QWEN3),
    "qwen3_vl_text": TextKind(QWEN3),
    "seed_oss": TextKind(GLM),
    "smollm3": TextKind(window=SWITCH),
    "stablelm": TextKind({"norm": "layernorm", "bias": False}),
    "starcoder2": TextKind({"norm": "layernorm", "gated": False}, window=ALL),
}


@dataclass(frozen=True)
class VisionKind:
    """A type of vision encoder.

    Attributes
    ----------
    model
        Values of the section ``vision`` that are not those of CLIP: LayerNorm, biases, no gate, learned
        positions.
    defaults
        The type whose defaults it has, if these are not its own.
    width, ffn
        The names of the key of its width, and of that of the width of its MLPs.
    """

    model: Section = field(default_factory=dict)
    defaults: str = ""
    width: tuple[str, ...] = ("hidden_size", "vt_hidden_size")
    ffn: tuple[str, ...] = ("intermediate_size", "vt_intermediate_size")


ROTATED: Section = {"positions": "rotary"}
GLM4V: Section = {
    "norm": "rmsnorm",
    "bias": False,
    "gated": True,
    "positions": "both",
    "projector_gated": True,
}
VISION_KINDS: Mapping[str, VisionKind] = {
    "clip_vision_model": VisionKind(),
    "glm4v_moe_vision": VisionKind(GLM4V, ffn=("out_hidden_size",)),
    "glm4v_vision": VisionKind(GLM4V, ffn=("out_hidden_size",)),
    "kimi_k25_vision": VisionKind({"positions": "both"}),
    "llama4_vision_model": VisionKind({"positions": "both"}),
    "moonvit": VisionKind({"positions": "both"}),
    "pixtral": VisionKind({"norm": "rmsnorm", "bias": False, "gated": True, **ROTATED}),
    "qwen2_5_vl_vision": VisionKind({"norm": "rmsnorm", "gated": True, **ROTATED}),
    "qwen2_vl_vision": VisionKind(ROTATED, width=("embed_dim",), ffn=("mlp_ratio",)),
    "qwen3_5_moe_vision": VisionKind({"positions": "both"}),
    "qwen3_5_vision": VisionKind({"positions": "both"}),
    "qwen3_vl_moe_vision": VisionKind({"positions": "both"}),
    "qwen3_vl_vision": VisionKind({"positions": "both"}),
    "siglip_vision_model": VisionKind(),
}


@dataclass(frozen=True)
class Wrapper:
    """A type of model with a language model and a vision encoder.

    Attributes
    ----------
    text, vision
        The types of its parts, where the file does not name them.
    merged
        The key of how many patches become one token, in each direction; None for one patch.
    projector
        Widths between the projector's matrices: of the merged patches (``merged``), of a patch (``patch``),
        of the model (``model``), or what a key says.
    pooled
        Whether merged patches are averaged.
    flat
        Whether files may have the language model's keys without ``text_config``, next to ``vision_config``.
    tied
        Which ``tie_word_embeddings`` counts where the file and its ``text_config`` differ.
    """

    text: str
    vision: str
    merged: str | None = None
    projector: tuple[str, ...] = ("model",)
    pooled: bool = False
    flat: bool = False
    tied: Literal["file", "text", "either"] = "file"


SQUARE: dict[str, Any] = {"merged": "spatial_merge_size", "projector": ("merged",)}
DOWNSAMPLED: dict[str, Any] = {
    "merged": "spatial_merge_size",
    "projector": ("out_hidden_size", "out_hidden_size", "intermediate_size"),
    "flat": True,
}
"""A convolution that merges patches, a matrix, and an MLP with a gate."""
WRAPPERS: Mapping[str, Wrapper] = {
    "gemma3": Wrapper(
        "gemma3_text", "siglip_vision_model", merged="mm_tokens_per_image", projector=(), pooled=True
    ),
    "glm46v": Wrapper("glm4v_text", "glm4v_vision", **DOWNSAMPLED),
    "glm4v": Wrapper("glm4v_text", "glm4v_vision", **DOWNSAMPLED, tied="either"),
    "glm4v_moe": Wrapper("glm4v_moe_text", "glm4v_moe_vision", **DOWNSAMPLED, tied="either"),
    "kimi_k25": Wrapper("deepseek_v3", "kimi_k25_vision", merged="merge_kernel_size", projector=("merged",)),
    "kimi_vl": Wrapper("deepseek_v3", "moonvit", merged="merge_kernel_size", projector=("merged",)),
    "llama4": Wrapper(
        "llama4_text",
        "llama4_vision_model",
        merged="pixel_shuffle_ratio",
        projector=("projector_input_dim", "projector_output_dim"),
        tied="text",
    ),
    "llava": Wrapper("llama", "clip_vision_model", tied="either"),
    "mistral3": Wrapper("mistral", "pixtral", merged="spatial_merge_size", projector=("patch", "model")),
    "qwen2_5_vl": Wrapper("qwen2_5_vl_text", "qwen2_5_vl_vision", **SQUARE, flat=True, tied="either"),
    "qwen2_vl": Wrapper("qwen2_vl_text", "qwen2_vl_vision", **SQUARE, flat=True, tied="either"),
    "qwen3_5": Wrapper("qwen3_5_text", "qwen3_5_vision", **SQUARE),
    "qwen3_5_moe": Wrapper("qwen3_5_moe_text", "qwen3_5_moe_vision", **SQUARE),
    "qwen3_vl": Wrapper("qwen3_vl_text", "qwen3_vl_vision", **SQUARE),
    "qwen3_vl_moe": Wrapper("qwen3_vl_moe_text", "qwen3_vl_moe_vision", **SQUARE),
}
