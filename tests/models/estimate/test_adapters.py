"""Files of PEFT: what is read, and what is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest
from support.estimates import llama
from zbv_models.estimate.adapters import from_peft
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.model_layers import trained_parameters_of
from zbv_solver.errors import InvalidInput

FILE: dict[str, Any] = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "some/model", "revision": None,
    "inference_mode": True, "auto_mapping": None, "r": 4, "lora_alpha": 32, "lora_dropout": 0.05,
    "target_modules": ["v_proj", "q_proj"], "exclude_modules": None, "bias": "none", "use_dora": False,
    "use_rslora": True, "fan_in_fan_out": False, "init_lora_weights": True, "layers_to_transform": None,
    "layers_pattern": None, "rank_pattern": {}, "alpha_pattern": {"q_proj": 8}, "modules_to_save": None,
    "target_parameters": None, "loftq_config": {}, "megatron_core": "megatron.core", "qalora_group_size": 16,
}  # fmt: skip
"""As PEFT writes it."""


@pytest.mark.parametrize(
    ("more", "modules", "layers", "count"),
    [
        ({}, ["v_proj", "q_proj"], None, 4 * 4 * (64 + 32 + 64 + 64)),
        ({"target_modules": "all-linear"}, ["all-linear"], None, 4 * 4 * (2 * (128 + 96) + 3 * (64 + 96))),
        ({"target_modules": None}, None, None, 4 * 4 * (2 * (128 + 96) + 3 * (64 + 96))),
        ({"target_modules": ["self_attn.o_proj"], "r": 2}, ["o_proj"], None, 4 * 2 * 128),
        ({"target_modules": ["c_attn", "c_proj"]}, ["linear_qkv", "o_proj", "down_proj"], None,
         4 * 4 * (64 + 128 + 128 + 160)),
        ({"layers_to_transform": [1, 3]}, ["v_proj", "q_proj"], ["1", "3"], 2 * 4 * 224),
        ({"layers_to_transform": 2}, ["v_proj", "q_proj"], ["2"], 4 * 224),
    ],
)  # fmt: skip
def test_a_file_is_the_adapters_of_a_model(
    more: dict[str, Any], modules: list[str] | None, layers: list[str] | None, count: int
) -> None:
    found = from_peft({**FILE, **more})
    assert (found.get("target_modules"), found.get("layers_to_transform")) == (modules, layers)
    model = llama(hidden=64, layers=4, heads=4, kv_heads=2, ffn=96, vocabulary=200, sequence=64)
    adapted = Transformer.model_validate({**model.model_dump(), **found})
    assert trained_parameters_of(adapted).total == count


def test_what_is_given_replaces_what_the_file_says() -> None:
    regular = {**FILE, "target_modules": ".*proj", "modules_to_save": ["lm_head"]}
    assert from_peft(regular, {"target_modules", "frozen"}) == {"lora_rank": 4}
    assert from_peft(FILE, {"lora_rank"}) == {"target_modules": ["v_proj", "q_proj"]}


@pytest.mark.parametrize(
    ("more", "pointers", "words"),
    [
        ({"peft_type": "IA3"}, "/peft_type", "must be LORA"),
        ({"use_dora": True, "rank_pattern": {"q_proj": 8}}, "/use_dora /rank_pattern", "no such adapters"),
        ({"sparsity": 0.5}, "/sparsity", "found 0.5"),
        ({"bias": "lora_only"}, "/bias", "must be none"),
        ({"r": "8"}, "/r", "whole number"),
        ({"modules_to_save": ["lm_head"]}, "/modules_to_save", "--frozen"),
        ({"target_modules": ".*proj"}, "/target_modules", "--target-modules"),
        ({"target_modules": ["q_proj", "lm_head"]}, "/target_modules", "no adapters for 'lm_head'"),
        ({"target_modules": ["layers.0.q_proj"]}, "/target_modules", "every layer"),
        ({"layers_to_transform": ["0"]}, "/layers_to_transform", "number of a layer"),
    ],
)
def test_what_has_no_formula_is_refused_by_its_name(more: dict[str, Any], pointers: str, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        from_peft({**FILE, **more})
    assert [issue.pointer for issue in caught.value.issues] == pointers.split()
    assert words in caught.value.issues[0].detail


@pytest.mark.parametrize("document", [[], "LORA", None, {}])
def test_other_files_are_refused(document: Any) -> None:
    with pytest.raises(InvalidInput, match="adapter_config"):
        from_peft(document)
