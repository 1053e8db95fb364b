"""Reads the ``config.json`` of a transformers model as the section ``model`` of a configuration.

Every key is read, or known to have no effect on costs, or refused by its name. Where a key is absent, the
default of transformers' configuration class counts (``transformers_defaults.json``). A file does not say how
long sequences are in training, so ``sequence`` is not read.
"""

from __future__ import annotations

from typing import Any

from zbv_solver.documents.validation import quoted
from zbv_solver.errors import InvalidInput, did_you_mean

from zbv_models.estimate.families import TEXT_KINDS, WRAPPERS
from zbv_models.estimate.sections import Section
from zbv_models.estimate.transformers_keys import Document, Keys, defaults
from zbv_models.estimate.transformers_kinds import TextKind
from zbv_models.estimate.transformers_text import read_experts, read_layers
from zbv_models.estimate.transformers_vision import read_vision

GATES = ("attn_output_gate", "attention_output_gate", "gated_attention")
TEXTS = ("text_config", "llm_config", "language_config")
"""Sections with a language model in files of other types."""
MOST_LETTERS = 40
MEASURED = "Where transformers is installed, `zbv estimate`, `zbv layout`, `zbv-service layout` measure it."
QUANTIZED = ("quantization_config", "compression_config", "quantization")
"""Keys that say how the published weights are stored, which is not how they train."""
DROPOUTS = (
    *("hidden_dropout", "resid_pdrop", "embd_pdrop", "residual_dropout", "embedding_dropout", "dropout"),
    *("output_dropout", "emb_pdrop", "embed_dropout"),
)
"""Dropout outside attention; inside flash attention it costs nothing."""


def is_transformers_config(document: Any) -> bool:
    """Whether a document is a ``config.json`` and not a configuration of zbv."""
    return isinstance(document, dict) and "model_type" in document and "model" not in document


def needs_transformers(document: Any) -> bool:
    """Whether a document is a ``config.json`` whose type zbv does not know, so that it must be measured."""
    if not is_transformers_config(document):
        return False
    return document["model_type"] not in (*TEXT_KINDS, *WRAPPERS)


def from_transformers(document: Document) -> Section:
    """The section ``model``, without ``sequence``.

    Raises
    ------
    InvalidInput
        The type of the model is unknown, or a key has no formula; one issue per such key.
    """
    name = document["model_type"]
    if isinstance(name, str) and name in WRAPPERS:
        return _with_origin(_wrapped(document, name), document)
    if not isinstance(name, str) or name not in TEXT_KINDS:
        raise _unknown(document, "")
    keys, model = _text(document, name, "")
    _refuse_unread(keys)
    return _with_origin(model, document)


def _with_origin(model: Section, document: Document, **origin: Any) -> Section:
    """The model with what a reader must know of its file."""
    for section in (document, *(document.get(key) for key in TEXTS)):
        if not isinstance(section, dict):
            continue
        for how in (section[key] for key in QUANTIZED if section.get(key)):
            words = (how.get("quant_algo"), how.get("quant_method")) if isinstance(how, dict) else ()
            named = next((each for each in words if isinstance(each, str) and each), "another type")
            origin.setdefault("quantized", named[:MOST_LETTERS])
    if not origin:
        return model
    return {
        **model,
        "origin": {"model_type": document["model_type"], **(model.get("origin") or {}), **origin},
    }


def read_config(document: Document, sequence: int) -> Section:
    """The section ``model`` of a file of any type that zbv or transformers knows, for sequences of a length.

    Of a type that zbv does not know, it is the language model alone, if the file has a section for it; layers
    without formulas are measured (:mod:`zbv_models.estimate.module_tree`). That runs code of transformers,
    which takes seconds: a service must not do it for a request.

    Raises
    ------
    InvalidInput
        As :func:`from_transformers`; or transformers is not installed, or cannot make a decoder of the file.
    """
    name = document["model_type"]
    if not needs_transformers(document):
        return from_transformers(document)
    texts = (key for key in (*TEXTS, "thinker_config") if is_transformers_config(document.get(key)))
    if isinstance(name, str) and (key := next(texts, None)) is not None:
        outer = {each: document[each] for each in ("tie_word_embeddings",) if each in document}
        try:
            model = read_config({**outer, **document[key]}, sequence)
        except InvalidInput as error:
            raise error.below(f"/{key}") from None
        return _with_origin(model, {**document, key: None}, model_type=name, text_alone=True)
    try:
        from zbv_models.estimate import module_tree  # late: it imports torch and transformers
    except ImportError as error:
        remedy = f"With transformers, zbv measures its layers: pip install 'zbv[transformers]' ({error})."
        raise _unknown(document, "", remedy) from None
    if not isinstance(name, str) or not module_tree.knows(name):
        raise _unknown(document, "", "The installed transformers does not know it either.")
    return _with_origin(module_tree.model_of(document, sequence), document)


def _refuse_unread(*sections: Keys) -> None:
    issues = [issue for keys in sections for issue in keys.unread()]
    if issues:
        raise InvalidInput(issues)


def _text(document: Document, name: Any, where: str) -> tuple[Keys, Section]:
    """A language model by itself."""
    if not isinstance(name, str) or name not in TEXT_KINDS:
        raise _unknown({**document, "model_type": name}, where)
    kind = TEXT_KINDS[name]
    if kind.translate is not None:
        document = kind.translate(document)
    values = {**defaults().get(kind.defaults or name, {}), **kind.computed}
    keys = Keys(document, values, where, kind.without_effect.split())
    model = {
        "hidden": keys.number("hidden_size", "n_embd", "n_embed", "d_model"),
        **read_layers(keys, kind),
        **_attention(keys),
        **_widths(keys, kind),
        **(kind.more(keys) if kind.more is not None else {}),
    }
    return keys, {key: value for key, value in model.items() if value is not None}


def _unknown(document: Document, where: str, more: str = MEASURED) -> InvalidInput:
    """The error of a type that zbv does not read, with what can be planned instead."""
    remedy = "Write its sizes as model.json instead."
    for key in TEXTS:
        text: Any = document.get(key)
        if _is_readable(text):
            remedy = (
                f"To plan its language model alone ({text['model_type']}), save the section {key} as a file "
                f"and give that. For the whole model, write its sizes as model.json."
            )
    known, name = {*TEXT_KINDS, *(() if where else WRAPPERS)}, document["model_type"]
    similar = did_you_mean(name, sorted(known)) if isinstance(name, str) else ""
    rule = f"zbv reads {len(known)} types, which docs/estimates.md lists.{similar}"
    return InvalidInput.at(f"{where}/model_type", f"found {quoted(name)}; {rule} {remedy} {more}")


def _is_readable(document: Any) -> bool:
    """Whether a section by itself is the file of a language model."""
    if not is_transformers_config(document) or document["model_type"] not in tuple(TEXT_KINDS):
        return False
    try:
        from_transformers(document)
    except InvalidInput:
        return False
    return True


def _attention(keys: Keys) -> Section:
    """Heads and latent vectors."""
    model: Section = {"heads": keys.number("num_attention_heads", "n_head", "n_heads")}
    head, groups = (
        keys.size("head_dim", "attention_head_dim"),
        keys.size("num_key_value_heads", "num_query_groups", "num_attention_groups"),
    )
    if keys.size("kv_lora_rank") is None:
        value = keys.size("v_head_dim")
        return {**model, "kv_heads": groups, "head_dim": head, "value_dim": None if value == head else value}
    latent = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    sizes = {name: keys.size(name) for name in latent if name != "qk_rope_head_dim"}
    has_rotated = keys.get("qk_rope_head_dim") is not None
    sizes["qk_rope_head_dim"] = keys.count("qk_rope_head_dim") if has_rotated else None
    plain, rotated, both = sizes["qk_nope_head_dim"], sizes["qk_rope_head_dim"], keys.size("qk_head_dim")
    if both is not None and plain is not None and rotated is not None and both != plain + rotated:
        rule = f"must be qk_nope_head_dim + qk_rope_head_dim ({plain + rotated})."
        raise keys.wrong("qk_head_dim", f"found {both}; {rule}")
    return {**model, **sizes}


def _widths(keys: Keys, kind: TextKind) -> Section:
    """MLPs, experts, biases, norms, and the ends of the model."""
    dtype = keys.get("dtype", "torch_dtype")
    everywhere = keys.flag("use_bias")
    dropouts = [_has_dropout(keys, name) for name in DROPOUTS]
    has_norms, has_gate = keys.flag("use_qk_norm", "qk_layernorm", "qk_norm"), keys.get(*GATES) is not None
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
        kept = ("model_type", "vision_config", "audio_config")
        text = {key: value for key, value in document.items() if key not in (*kept, "text_config")}
        where, document = "", {key: document[key] for key in kept if key in document}
        outside = Keys(document, {**defaults().get(name, {}), "text_config": text})
    else:
        where, outside = "/text_config", Keys(document, defaults().get(name, {}))
    text, seen = outside.get(*TEXTS), outside.get("vision_config")
    outside.get("audio_config")  # encoders of sound are left out
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
    if not wrapper.vision:
        _refuse_unread(keys)
        return model
    if seen is None:
        for key in (wrapper.merged or "", "projection_hidden_size"):
            outside.get(key)  # has no effect without an encoder
        _refuse_unread(outside, keys)
        return model
    encoder, vision = read_vision(seen, wrapper, outside, model)
    _refuse_unread(outside, keys, encoder)
    return {**model, "vision": {key: value for key, value in vision.items() if value is not None}}
