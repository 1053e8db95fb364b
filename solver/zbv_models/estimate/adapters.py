"""Reads the ``adapter_config.json`` of PEFT's LoRA as keys of the section ``model``.

Every key is read, or known to have no effect on costs, or refused by its name if it has a value
(huggingface/peft, ``src/peft/tuners/lora/config.py``).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from zbv_solver.documents.validation import quoted
from zbv_solver.errors import InvalidInput, Issue

from zbv_models.estimate.model import TARGET_MODULES
from zbv_models.estimate.part import ALL_LINEAR
from zbv_models.estimate.sections import Section

NAMES = {
    **{name: (name,) for name in TARGET_MODULES},
    **dict.fromkeys(("query_key_value", "qkv_proj", "c_attn", "Wqkv", "W_pack"), ("linear_qkv",)),
    **dict.fromkeys(("gate_up_proj", "dense_h_to_4h", "c_fc", "fc1"), ("linear_fc1",)),
    **dict.fromkeys(("dense_4h_to_h", "fc2", "w2"), ("down_proj",)),
    **dict.fromkeys(("dense", "out_proj", "wo"), ("o_proj",)),
    **{"w1": ("gate_proj",), "w3": ("up_proj",), "wq": ("q_proj",), "wk": ("k_proj",), "wv": ("v_proj",)},
    "c_proj": ("o_proj", "down_proj"),
}
"""Matrices of zbv by the names of modules in transformers: gpt2 has two modules of the name ``c_proj``."""
WITHOUT_EFFECT = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "task_type"),
        *("peft_version", "lora_alpha", "lora_dropout", "alpha_pattern", "fan_in_fan_out", "use_rslora"),
        *("init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        *("layers_pattern", "runtime_config", "megatron_config", "megatron_core", "qalora_group_size"),
        "ensure_weight_tying",
    )
)
READ = frozenset(("peft_type", "r", "bias", "target_modules", "layers_to_transform", "modules_to_save"))


def from_peft(document: Any, given: Collection[str] = ()) -> Section:
    """The keys ``lora_rank``, ``target_modules`` and ``layers_to_transform``.

    Parameters
    ----------
    given
        Keys of the section ``model`` that are known otherwise; what the file says of these does not count.

    Raises
    ------
    InvalidInput
        The file is not that of LoRA, or a key has no formula; one issue per such key.
    """
    if not isinstance(document, dict) or document.get("peft_type") != "LORA":
        kind = document.get("peft_type") if isinstance(document, dict) else document
        raise InvalidInput.at(
            "/peft_type", f"found {quoted(kind)}; must be LORA, in an adapter_config.json of PEFT."
        )
    issues = [
        Issue(f"/{key}", f"found {quoted(value)}; estimates have no such adapters. Remove it.")
        for key, value in document.items()
        if value and key not in WITHOUT_EFFECT | READ
    ]
    if document.get("bias", "none") != "none":
        detail = f"found {quoted(document['bias'])}; must be none: estimates train no single biases."
        issues.append(Issue("/bias", detail))
    if document.get("modules_to_save") and "frozen" not in given:
        detail = (
            f"found {quoted(document['modules_to_save'])}; say what does not train with --frozen, such as"
        )
        issues.append(Issue("/modules_to_save", f"{detail} --frozen layers embedding."))
    rank = document.get("r", 8)
    if type(rank) is not int or rank < 1:
        issues.append(Issue("/r", f"found {quoted(rank)}; must be a whole number of at least 1."))
    found: Section = {"lora_rank": rank}
    for key, read in (("target_modules", _modules), ("layers_to_transform", _layers)):
        if key not in given and document.get(key) is not None:
            try:
                found[key] = read(document[key])
            except ValueError as error:
                issues.append(Issue(f"/{key}", f"found {quoted(document[key])}; {error}"))
    if issues:
        raise InvalidInput(issues)
    return {key: value for key, value in found.items() if key not in given}


def _modules(value: Any) -> list[str]:
    """Matrices; the last part of a path names them."""
    if value == ALL_LINEAR:
        return [ALL_LINEAR]
    if not isinstance(value, list):
        raise ValueError(
            "must be a list of names or all-linear. Name the matrices of a regular expression, as in "
            "--target-modules q_proj v_proj."
        )
    names = list[str]()
    for word in value:
        *path, name = str(word).split(".")
        if name not in NAMES or any(part.isdigit() for part in path):
            raise ValueError(
                f"zbv has no adapters for {quoted(word)}. Name matrices of every layer, as in "
                f"--target-modules q_proj v_proj."
            )
        names += NAMES[name]
    return list(dict.fromkeys(names))


def _layers(value: Any) -> list[str]:
    """Layers, each as a word."""
    places = value if isinstance(value, list) else [value]
    if not all(type(place) is int and place >= 0 for place in places):
        raise ValueError("must be the number of a layer, or a list of such numbers.")
    return [str(place) for place in places]
