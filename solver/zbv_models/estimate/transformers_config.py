"""Reads the ``config.json`` of a transformers model as the section ``model`` of a configuration.

Every key is read, or known to have no effect on costs, or refused by its name. Where a key is absent, the
default of transformers' configuration class counts (``transformers_defaults.json``). A file does not say how
long sequences are in training, so ``sequence`` is not read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from zbv_solver.documents.validation import quoted
from zbv_solver.errors import InvalidInput

from zbv_models.estimate.sections import Section
from zbv_models.estimate.transformers_keys import Document, Keys
from zbv_models.estimate.transformers_text import (
    TEXT_KINDS,
    TextKind,
    read_attention,
    read_experts,
    read_layers,
)


@dataclass(frozen=True)
class VisionKind:
    """A type of vision encoder."""

    model: Section = field(default_factory=dict)
    """Values of the section ``vision`` that are not those of CLIP: LayerNorm, biases, no gate, learned
    positions."""
    defaults: str = ""
    """The type whose defaults it has, if these are not its own."""
    width: tuple[str, ...] = ("hidden_size", "vt_hidden_size")
    ffn: tuple[str, ...] = ("intermediate_size", "vt_intermediate_size")
    """The names of the key of its width, and of that of the width of its MLPs."""


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
    """A type of model with a language model and a vision encoder."""

    text: str
    vision: str
    """The types of its parts, where the file does not name them."""
    merged: str | None = None
    """The key of how many patches become one token, in each direction; None for one patch."""
    projector: tuple[str, ...] = ("model",)
    """Widths between the projector's matrices: of the merged patches (``merged``), of a patch (``patch``),
    of the model (``model``), or what a key says."""
    pooled: bool = False
    """Whether merged patches are averaged."""
    flat: bool = False
    """Whether files may have the language model's keys without ``text_config``, next to ``vision_config``."""
    tied: Literal["file", "text", "either"] = "file"
    """Which ``tie_word_embeddings`` counts where the file and its ``text_config`` differ."""


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

GATES = ("attn_output_gate", "attention_output_gate", "gated_attention")
TEXTS = ("text_config", "llm_config", "language_config")
"""Sections with a language model in files of other types."""
DROPOUTS = ("hidden_dropout", "resid_pdrop", "embd_pdrop", "residual_dropout", "embedding_dropout", "dropout")
"""Dropout outside attention; inside flash attention it costs nothing."""


def is_transformers_config(document: Any) -> bool:
    """Whether a document is a ``config.json`` and not a configuration of zbv."""
    return isinstance(document, dict) and "model_type" in document and "model" not in document


def from_transformers(document: Document) -> Section:
    """The section ``model``, without ``sequence``.

    Raises
    ------
    InvalidInput
        The type of the model is unknown, or a key has no formula; one issue per such key.
    """
    name = document["model_type"]
    if isinstance(name, str) and name in WRAPPERS:
        return _wrapped(document, name)
    if not isinstance(name, str) or name not in TEXT_KINDS:
        raise _unknown(document, "")
    keys, model = _text(document, name, "")
    _refuse_unread(keys)
    return model


def _refuse_unread(*sections: Keys) -> None:
    issues = [issue for keys in sections for issue in keys.unread()]
    if issues:
        raise InvalidInput(issues)


@cache
def defaults() -> dict[str, Document]:
    """The defaults of transformers 5 by type: of the keys that are read, where they are not null."""
    text = files(__package__).joinpath("transformers_defaults.json").read_text(encoding="utf-8")
    found: dict[str, Document] = json.loads(text)
    return found


def _text(document: Document, name: Any, where: str) -> tuple[Keys, Section]:
    """A language model by itself."""
    if not isinstance(name, str) or name not in TEXT_KINDS:
        raise _unknown({**document, "model_type": name}, where)
    kind = TEXT_KINDS[name]
    keys = Keys(document, {**defaults().get(kind.defaults or name, {}), **kind.computed}, where)
    model = {
        "hidden": keys.number("hidden_size", "n_embd", "n_embed"),
        **read_layers(keys, kind),
        **read_attention(keys),
        **_widths(keys, kind),
    }
    return keys, {key: value for key, value in model.items() if value is not None}


def _unknown(document: Document, where: str) -> InvalidInput:
    """The error of a type that zbv does not read, with what can be planned instead."""
    remedy = "Write its sizes as model.json instead."
    for key in TEXTS:
        text: Any = document.get(key)
        if _is_readable(text):
            remedy = (
                f"To plan its language model alone ({text['model_type']}), save the section {key} as a file "
                f"and give that. For the whole model, write its sizes as model.json."
            )
    known = ", ".join(sorted(TEXT_KINDS if where else (*TEXT_KINDS, *WRAPPERS)))
    detail = f"found {quoted(document['model_type'])}; zbv reads {known}. {remedy}"
    return InvalidInput.at(f"{where}/model_type", detail)


def _is_readable(document: Any) -> bool:
    """Whether a section by itself is the file of a language model."""
    if not is_transformers_config(document) or document["model_type"] not in tuple(TEXT_KINDS):
        return False
    try:
        from_transformers(document)
    except InvalidInput:
        return False
    return True


def _widths(keys: Keys, kind: TextKind) -> Section:
    """MLPs, experts, biases, norms, and the ends of the model."""
    dtype = keys.get("dtype", "torch_dtype")
    everywhere = keys.flag("use_bias")
    dropouts = [_has_dropout(keys, name) for name in DROPOUTS]
    has_norms, has_gate = keys.flag("use_qk_norm", "qk_layernorm"), keys.get(*GATES) is not None
    return {
        "ffn": keys.size(kind.dense_width, "n_inner"),
        **read_experts(keys, kind),
        "gated": True,
        "norm": "rmsnorm",
        "positions": "rotary",
        "bias": keys.flag("mlp_bias") or everywhere,
        "qkv_bias": keys.flag("attention_bias", "use_qkv_bias", "qkv_bias") or everywhere,
        "qk_norm": has_norms,
        "dropout": any(dropouts),
        "vocabulary": keys.number("vocab_size"),
        "tied_embeddings": keys.flag("tie_word_embeddings"),
        "dtype": dtype if dtype in ("bfloat16", "float16") else "bfloat16",
        **kind.model,
        **({"output_gate": keys.flag(*GATES)} if has_gate else {}),
    }


def _has_dropout(keys: Keys, name: str) -> bool:
    share = keys.get(name) or 0
    if not isinstance(share, int | float):
        raise keys.wrong(name, f"found {quoted(share)}; must be a number.")
    return share > 0


def _wrapped(document: Document, name: str) -> Section:
    """A language model with a vision encoder; without ``vision_config``, the language model alone."""
    wrapper = WRAPPERS[name]
    if wrapper.flat and document.get("text_config") is None:
        kept = ("model_type", "vision_config")
        text = {key: value for key, value in document.items() if key not in (*kept, "text_config")}
        where, document = "", {key: document[key] for key in kept if key in document}
        outside = Keys(document, {**defaults().get(name, {}), "text_config": text})
    else:
        where, outside = "/text_config", Keys(document, defaults().get(name, {}))
    text, seen = outside.get("text_config"), outside.get("vision_config")
    for key, value in (("text_config", text), ("vision_config", {} if seen is None else seen)):
        if not isinstance(value, dict):
            raise outside.wrong(key, f"found {quoted(value)}; must be an object.")
    # The classes of kimi_k25 and mistral3 are tied by default, but their published files are not: no default.
    if outside.get("tie_word_embeddings") is not None:
        tied = outside.flag("tie_word_embeddings")
        counts = wrapper.tied == "file" or (wrapper.tied == "either" and tied)
        text = {**text, "tie_word_embeddings": tied} if counts else text
    keys, model = _text(text, text.get("model_type", wrapper.text), where)
    repeated, vocabulary = outside.get("vocab_size"), model.get("vocabulary")
    if repeated not in (None, vocabulary):
        detail = f"found {quoted(repeated)}, but the language model has {quoted(vocabulary)}."
        raise outside.wrong("vocab_size", f"{detail} Remove it, or correct text_config.")
    if seen is None:
        for key in (wrapper.merged or "", *PROJECTOR):
            outside.get(key)  # has no effect without an encoder
        _refuse_unread(outside, keys)
        return model
    encoder, vision = read_vision(seen, wrapper, outside, model)
    _refuse_unread(outside, keys, encoder)
    return {**model, "vision": {key: value for key, value in vision.items() if value is not None}}


PROJECTOR = ("projection_hidden_size",)
"""Keys around the encoder's: the width of a projector's norm."""
WHERE = "/vision_config"


def read_vision(document: Document, wrapper: Wrapper, outside: Keys, model: Section) -> tuple[Keys, Section]:
    """The section ``vision`` and the keys it was read from.

    Images are as large as the file says: ``image_size``, or the table of positions. How many images a
    sequence has is not part of a file; one is assumed.

    Parameters
    ----------
    outside
        The keys around ``vision_config``.
    model
        The section ``model`` of the language model.

    Raises :class:`InvalidInput` for an encoder without a formula.
    """
    name = document.get("model_type") or wrapper.vision
    if name == outside.get("model_type"):  # older files repeat it
        name = wrapper.vision
    if not isinstance(name, str) or name not in VISION_KINDS:
        detail = (
            f"found {quoted(name)}; zbv has formulas for {', '.join(VISION_KINDS)}. Write the sizes of the "
            f"encoder as vision in model.json, or remove vision_config to plan the language model alone."
        )
        raise InvalidInput.at(f"{WHERE}/model_type", detail)
    kind = VISION_KINDS[name]
    keys = Keys(document, defaults().get(kind.defaults or name, {}), WHERE)
    hidden = keys.number(*kind.width)
    patch = _side(keys, "patch_size", "spatial_patch_size")
    channels = keys.size("num_channels", "in_channels", "in_chans") or 3
    patches = _patches(keys, patch)
    merged = _merged(wrapper, keys, outside, patches)
    outside.get(*PROJECTOR)
    layers = keys.number("num_hidden_layers", "depth", "vt_num_hidden_layers")
    levels = keys.places(layers, "deepstack_visual_indexes")
    widths = {"merged": merged * hidden, "patch": hidden, "model": model.get("hidden")}
    _check_width(keys, kind, model)
    for key in ("projection_dim", "mm_hidden_size", "vocab_size", "head_dim", "tokens_per_second"):
        keys.get(key)  # a head that is not used, a width that others give, or the rate of videos
    return keys, {
        "hidden": hidden,
        "layers": layers,
        "heads": keys.number("num_attention_heads", "num_heads", "vt_num_attention_heads"),
        "ffn": _ffn(keys, kind, hidden),
        "patches": patches,
        "patch_values": channels * patch**2 * _side(keys, "temporal_patch_size"),
        "merged": merged,
        "pooled": wrapper.pooled,
        "projector": [widths[each] if each in widths else keys.number(each) for each in wrapper.projector],
        "projectors": 1 + len(levels),
        **_pieces(keys, layers, patch),
        **kind.model,
    }


def _check_width(keys: Keys, kind: VisionKind, model: Section) -> None:
    """Raise :class:`InvalidInput` where the encoder gives tokens of another width than the model's."""
    for name in ("out_hidden_size", "text_hidden_size", "hidden_size"):
        if name in kind.width:
            continue
        width = keys.size(name)
        if keys.has(name) and width != model.get("hidden"):
            rule = f"must be the width of the language model ({model.get('hidden')})."
            raise keys.wrong(name, f"found {quoted(width)}; {rule}")


def _ffn(keys: Keys, kind: VisionKind, hidden: int) -> int | None:
    """The width of its MLPs, which some files give as a multiple of the encoder's."""
    if kind.ffn != ("mlp_ratio",):
        return keys.size(*kind.ffn)
    ratio = keys.get("mlp_ratio")
    if ratio is None:
        return None
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1000:
        raise keys.wrong("mlp_ratio", f"found {quoted(ratio)}; must be a number above 0.")
    return int(hidden * ratio)


def _pieces(keys: Keys, layers: int, patch: int) -> Section:
    """The pieces of an image within which most blocks attend (Bai et al. 2025, Qwen2.5-VL, §2.1.1)."""
    size = keys.size("window_size")
    if size is None:
        return {}
    return {
        "window": max(1, size // patch) ** 2,
        "full_attention": keys.places(layers, "fullatt_block_indexes"),
    }


def _side(keys: Keys, *names: str) -> int:
    """A size in pixels of a square, 1 if the type of encoder has none."""
    name, value = names[0], keys.get(*names)
    if isinstance(value, list | tuple):
        if not value or list(value) != [value[0]] * len(value):
            raise keys.wrong(
                name, f"found {quoted(value)}; zbv reads squares only. Write model.json instead."
            )
        value = value[0]
    if value is not None and (type(value) is not int or not 1 <= value <= 100_000):
        raise keys.wrong(name, f"found {quoted(value)}; must be a whole number above 0.")
    return value or 1


def _patches(keys: Keys, patch: int) -> int:
    """Patches of an image: of the largest, or as many as there are learned positions."""
    table: Any = keys.get("num_position_embeddings")
    if table is not None:
        return keys.number("num_position_embeddings")
    if keys.get("pos_emb_height", "init_pos_emb_height") is not None:
        keys.get("pos_emb_time", "init_pos_emb_time")
        return keys.number("pos_emb_height", "init_pos_emb_height") * keys.number(
            "pos_emb_width", "init_pos_emb_width"
        )
    if keys.get("image_size") is None:
        detail = (
            "this key is absent, and this type of encoder has no default. Add how many pixels a side of an "
            "image has, or remove vision_config to plan the language model alone."
        )
        raise keys.wrong("image_size", detail)
    return max(1, _side(keys, "image_size") // patch) ** 2


def _merged(wrapper: Wrapper, keys: Keys, outside: Keys, patches: int) -> int:
    """Patches that become one token."""
    name = wrapper.merged
    if name is None:
        return 1
    if name == "pixel_shuffle_ratio":
        ratio = keys.get(name)
        if not isinstance(ratio, int | float) or not 0 < ratio <= 1:
            raise keys.wrong(name, f"found {quoted(ratio)}; must be above 0 and at most 1.")
        return round(1 / ratio**2)
    if name == "mm_tokens_per_image":
        return max(1, patches // outside.number(name))
    where = outside if outside.has(name) or keys.get(name) is None else keys
    return _side(where, name) ** 2
