"""Reads the ``config.json`` of a transformers model as the section ``model`` of a configuration.

Every key is read, or known to have no effect on costs, or refused by its name. Where a key is absent, the
default of transformers' configuration class counts (``transformers_defaults.json``). A file does not say how
long sequences are in training, so ``sequence`` is not read.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from zbv_solver.documents.validation import quoted
from zbv_solver.errors import InvalidInput
from zbv_solver.estimate.transformers_keys import Document, Keys
from zbv_solver.estimate.transformers_kinds import TEXT_KINDS, WRAPPERS, Section, TextKind
from zbv_solver.estimate.transformers_layers import read_attention, read_experts, read_layers
from zbv_solver.estimate.transformers_vision import PROJECTOR, read_vision

GATES = ("attn_output_gate", "attention_output_gate", "gated_attention")
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
        known = ", ".join(sorted((*TEXT_KINDS, *WRAPPERS)))
        detail = f"found {quoted(name)}; zbv reads {known}. Write its sizes as model.json instead."
        raise InvalidInput.at(f"{where}/model_type", detail)
    kind = TEXT_KINDS[name]
    keys = Keys(document, {**defaults().get(kind.defaults or name, {}), **kind.computed}, where)
    model = {
        "hidden": keys.get("hidden_size", "n_embd", "n_embed"),
        **read_layers(keys, kind),
        **read_attention(keys),
        **_widths(keys, kind),
    }
    return keys, {key: value for key, value in model.items() if value is not None}


def _widths(keys: Keys, kind: TextKind) -> Section:
    """MLPs, experts, biases, norms, and the ends of the model."""
    dtype = keys.get("dtype", "torch_dtype")
    everywhere = keys.flag("use_bias")
    dropouts = [_has_dropout(keys, name) for name in DROPOUTS]
    has_norms, has_gate = keys.flag("use_qk_norm", "qk_layernorm"), keys.get(*GATES) is not None
    return {
        "ffn": keys.get(kind.dense_width, "n_inner"),
        **read_experts(keys, kind),
        "gated": True,
        "norm": "rmsnorm",
        "positions": "rotary",
        "bias": everywhere or keys.flag("mlp_bias"),
        "qkv_bias": everywhere or keys.flag("attention_bias", "use_qkv_bias", "qkv_bias"),
        "qk_norm": has_norms,
        "dropout": any(dropouts),
        "vocabulary": keys.get("vocab_size"),
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
    outside = Keys(document, defaults().get(name, {}))
    text, seen = outside.get("text_config"), outside.get("vision_config")
    for key, value in (("text_config", text), ("vision_config", {} if seen is None else seen)):
        if not isinstance(value, dict):
            raise outside.wrong(key, f"found {quoted(value)}; must be an object.")
    tied = outside.get("tie_word_embeddings")  # transformers reads it here, and passes it on to the text
    if outside.has("tie_word_embeddings"):
        text = {**text, "tie_word_embeddings": tied}
    keys, model = _text(text, text.get("model_type", wrapper.text), "/text_config")
    repeated, vocabulary = outside.get("vocab_size"), model.get("vocabulary")
    if repeated not in (None, vocabulary):
        detail = f"found {quoted(repeated)}, but the language model has {quoted(vocabulary)}."
        raise outside.wrong("vocab_size", f"{detail} Remove it, or correct text_config.")
    if seen is None:
        for key in (wrapper.merged or "", *PROJECTOR):
            outside.get(key)  # has no effect without an encoder
        _refuse_unread(outside, keys)
        return model
    encoder, vision = read_vision(seen, wrapper, outside, model, defaults())
    _refuse_unread(outside, keys, encoder)
    return {**model, "vision": {key: value for key, value in vision.items() if value is not None}}
