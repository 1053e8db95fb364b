"""Reads the ``config.json`` of a transformers model as the section ``model`` of a configuration.

The keys are those of the configuration classes of transformers 4 and 5. A file does not say how long
sequences are in training, so ``sequence`` is not read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zbv_solver.documents.validation import quoted
from zbv_solver.errors import InvalidInput
from zbv_solver.estimate.state_space import Mamba

Document = dict[str, Any]
Section = dict[str, Any]

REQUIRED_KEYS = {
    "nemotron_h": ("hidden_size", "num_attention_heads"),
    "gpt2": ("n_embd", "n_layer", "n_head"),
    "bloom": ("n_layer", "n_head"),
}
LETTERS = {
    **{letter: letter for letter in "M*-E"},
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
}
COMMON_KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads")


def is_transformers_config(document: Any) -> bool:
    """Whether a document is a ``config.json`` and not a configuration of zbv."""
    return isinstance(document, dict) and "model_type" in document and "model" not in document


def from_transformers(document: Document) -> Section:
    """The section ``model``, without ``sequence``.

    Raises
    ------
    InvalidInput
        The type of the model is unknown, a key is absent, or zbv has no formula for a property of the model.
    """
    name = document["model_type"]
    if not isinstance(name, str) or name not in READERS:
        known = ", ".join(sorted(READERS))
        detail = f"found {quoted(name)}; zbv reads {known}. Write its sizes as model.json instead."
        raise InvalidInput.at("/model_type", detail)
    if name == "llava":
        return _llava(document)
    for key in (*REQUIRED_KEYS.get(name, COMMON_KEYS), "vocab_size"):
        if key not in document:
            raise InvalidInput.at(f"/{key}", f"this key is absent, and a config.json of {name} needs it.")
    return {key: value for key, value in READERS[name](document).items() if value is not None}


def _number(document: Document, key: str, default: int, where: str = "") -> int:
    """A positive whole number that the reader computes with."""
    value = document.get(key, default)
    if type(value) is not int or value < 1:
        raise InvalidInput.at(f"{where}/{key}", f"found {quoted(value)}; must be a whole number above 0.")
    return value


def _llama(document: Document) -> Section:
    """RMSNorm, a gate, rotary positions, grouped heads, no biases; also of Mistral, Phi-3 and SmolLM3."""
    heads, dtype = document["num_attention_heads"], document.get("dtype", document.get("torch_dtype"))
    bias = bool(document.get("attention_bias", False))
    return {
        "hidden": document["hidden_size"],
        "layers": document["num_hidden_layers"],
        "heads": heads,
        "kv_heads": document.get("num_key_value_heads") or heads,
        "head_dim": document.get("head_dim"),
        "ffn": document.get("intermediate_size"),
        "gated": True,
        "vocabulary": document["vocab_size"],
        "tied_embeddings": bool(document.get("tie_word_embeddings", False)),
        "dtype": dtype if dtype in ("bfloat16", "float16") else "bfloat16",
        "norm": "rmsnorm",
        "bias": bool(document.get("mlp_bias", bias)),
        "qkv_bias": bias,
        "positions": "rotary",
        "window": document.get("sliding_window"),
    }


def _qwen2(document: Document) -> Section:
    if document.get("use_sliding_window"):
        detail = "found true; zbv has no formula for windows in the last layers. Set it to false."
        raise InvalidInput.at("/use_sliding_window", detail)
    return {**_llama(document), "qkv_bias": True, "window": None}


def _qwen3(document: Document) -> Section:
    bias = bool(document.get("attention_bias", False))
    width = document.get("head_dim", 128)
    return {**_qwen2(document), "head_dim": width, "qk_norm": True, "bias": bias, "qkv_bias": bias}


def _experts(document: Document, number: str, width: str = "moe_intermediate_size") -> Section:
    """Experts by transformers' key of their number."""
    count = document.get(number, document.get("num_local_experts"))
    for key, value in ((number, count), ("num_experts_per_tok", document.get("num_experts_per_tok"))):
        if value is None:
            raise InvalidInput.at(f"/{key}", "this key is absent, and a model with experts needs it.")
    return {
        "experts": count,
        "experts_per_token": document["num_experts_per_tok"],
        "expert_ffn": document.get(width),
    }


def _mixtral(document: Document) -> Section:
    return {**_llama(document), **_experts(document, "num_local_experts", "intermediate_size")}


def _sparse_qwen(document: Document) -> Section:
    """Experts in every n-th block, and MLPs in listed ones."""
    listed = document.get("mlp_only_layers") or []
    if listed != list(range(len(listed))):
        detail = (
            f"found {quoted(listed)}; zbv reads only the first layers of the model. Write model.json instead."
        )
        raise InvalidInput.at("/mlp_only_layers", detail)
    dense = {"dense_layers": len(listed), "expert_every": document.get("decoder_sparse_step", 1)}
    return {**_experts(document, "num_experts"), **dense}


def _qwen2_moe(document: Document) -> Section:
    shared = {
        "shared_expert_ffn": document.get("shared_expert_intermediate_size"),
        "shared_expert_gate": True,
    }
    return {**_qwen2(document), **_sparse_qwen(document), **shared}


def _qwen3_moe(document: Document) -> Section:
    return {**_qwen3(document), **_sparse_qwen(document)}


def _deepseek_experts(document: Document) -> Section:
    """Routed and shared experts after the first blocks, and modules of multi-token prediction."""
    if document.get("moe_layer_freq", 1) != 1:
        detail = f"found {quoted(document['moe_layer_freq'])}; zbv reads only 1. Write model.json instead."
        raise InvalidInput.at("/moe_layer_freq", detail)
    found, shared = _experts(document, "n_routed_experts"), None
    if document.get("n_shared_experts"):
        width = _number(document, "moe_intermediate_size", 1)
        shared = _number(document, "n_shared_experts", 1) * width
    predictions = document.get("num_nextn_predict_layers", document.get("num_mtp_layers", 0))
    has_groups = document.get("n_group") is not None and _number(document, "n_group", 1) > 1
    return {
        **found,
        "expert_nodes": document.get("topk_group") if has_groups else None,
        "shared_expert_ffn": shared,
        "dense_layers": document.get("first_k_dense_replace", 0),
        "prediction_layers": predictions or 0,
    }


def _deepseek(document: Document) -> Section:
    """Latent attention with the experts of DeepSeek."""
    latent = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    sizes = {key: document.get(key) for key in latent}
    return {
        **_llama(document),
        "kv_heads": None,
        "head_dim": None,
        **sizes,
        **_deepseek_experts(document),
    }


def _glm4_moe(document: Document) -> Section:
    model = {**_llama(document), **_deepseek_experts(document)}
    return {**model, "bias": False, "qk_norm": bool(document.get("use_qk_norm", False))}


def _gpt_oss(document: Document) -> Section:
    """Experts with biases; every second block has a window."""
    return {
        **_llama(document),
        **_experts(document, "num_local_experts", "intermediate_size"),
        "bias": True,
        "qkv_bias": True,
        "full_attention_every": 2 if document.get("sliding_window") else None,
    }


def _nemotron_h(document: Document) -> Section:
    """A letter per layer; no positions, no gates, and experts next to shared ones."""
    if document.get("moe_latent_size") is not None:
        found = quoted(document["moe_latent_size"])
        detail = f"found {found}; zbv has no formula for latent experts. Write model.json instead."
        raise InvalidInput.at("/moe_latent_size", detail)
    pattern = _pattern(document)
    sizes = {
        key: _number(document, name, default)
        for key, name, default in (
            ("heads", "mamba_num_heads", 128),
            ("state", "ssm_state_size", 128),
            ("groups", "n_groups", 8),
            ("kernel", "conv_kernel", 4),
            ("chunk", "chunk_size", 128),
        )
    }
    width, hidden = _number(document, "mamba_head_dim", 64), _number(document, "hidden_size", 1)
    model = {
        **_llama({"num_hidden_layers": len(pattern), **document}),
        "head_dim": document.get("head_dim", 128),
        "gated": False,
        "positions": "none",
        "pattern": pattern,
    }
    if "M" in pattern:
        model["state_space"] = Mamba(hidden, inner=sizes["heads"] * width, **sizes).costs()
    if "E" not in pattern:
        return model
    shared = document.get("moe_shared_expert_intermediate_size") if document.get("n_shared_experts") else None
    return {**model, **_experts(document, "n_routed_experts"), "shared_expert_ffn": shared}


def _pattern(document: Document) -> str:
    """The letters of the layers, from a string of them or from their names."""
    key = next(
        (key for key in ("hybrid_override_pattern", "layers_block_type") if key in document), "layer_types"
    )
    found = document.get(key)
    layers = found if isinstance(found, list | str) else []
    letters = [LETTERS.get(each) if isinstance(each, str) else None for each in layers]
    if not letters or None in letters:
        raise InvalidInput.at(
            f"/{key}", f"found {quoted(found)}; must have {', '.join(LETTERS)} for each layer."
        )
    return "".join(letter or "" for letter in letters)


def _gpt_neox(document: Document) -> Section:
    """LayerNorm, biases, an MLP without a gate."""
    return {
        **_llama(document),
        "kv_heads": None,
        "gated": False,
        "norm": "layernorm",
        "bias": True,
        "qkv_bias": True,
    }


def _gpt2(document: Document) -> Section:
    """As GPT-NeoX, with learned positions, and a head with the embedding's weights."""
    renamed = {
        "hidden_size": document.get("n_embd", document.get("hidden_size")),
        "num_hidden_layers": document["n_layer"],
        "num_attention_heads": document["n_head"],
        "intermediate_size": document.get("n_inner"),
        "tie_word_embeddings": document.get("tie_word_embeddings", True),
    }
    return {**_gpt_neox({**document, **renamed}), "positions": "learned"}


def _bloom(document: Document) -> Section:
    """As GPT-2, with biases of scores in place of positions."""
    hidden = document.get("hidden_size", document.get("n_embed"))
    if hidden is None:
        raise InvalidInput.at("/hidden_size", "this key is absent, and a config.json of bloom needs it.")
    return {**_gpt2({**document, "n_embd": hidden}), "positions": "none"}


def _llava(document: Document) -> Section:
    """A CLIP encoder in front of a language model; the projector makes a token of every patch."""
    for key in ("text_config", "vision_config"):
        if not isinstance(document.get(key), dict):
            raise InvalidInput.at(f"/{key}", "this key is absent, and a config.json of llava needs it.")
    text, seen = document["text_config"], document["vision_config"]
    model = from_transformers({"model_type": "llama", **text})
    patch, pixels = (
        _number(seen, key, default, "/vision_config")
        for key, default in (("patch_size", 14), ("image_size", 336))
    )
    return {
        **model,
        "vision": {
            "hidden": seen.get("hidden_size", 1024),
            "layers": seen.get("num_hidden_layers", 24),
            "heads": seen.get("num_attention_heads", 16),
            "ffn": seen.get("intermediate_size", 4096),
            "patches": (pixels // patch) ** 2,
            "patch_values": 3 * patch**2,
        },
    }


READERS: dict[str, Callable[[Document], Section]] = {
    "bloom": _bloom,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "glm4_moe": _glm4_moe,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "gpt_oss": _gpt_oss,
    "kimi_k2": _deepseek,
    "llama": _llama,
    "llava": _llava,
    "mistral": _llama,
    "mixtral": _mixtral,
    "nemotron_h": _nemotron_h,
    "phi3": _llama,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "smollm3": _llama,
}
