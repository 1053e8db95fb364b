"""Parameter counts, against published figures."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.estimates import but, gpt, llama, parts, preset_config
from zbv_models.estimate.build import transformer
from zbv_models.estimate.config_model import ModelConfig
from zbv_models.estimate.parameters import Parameters
from zbv_models.estimate.problem_document import estimate_layers
from zbv_models.estimate.shapes import Degrees

LLAMA_3 = {"vocabulary": 128256, "kv_heads": 8, "sequence": 8192}


def model_parameters(model: ModelConfig) -> int:
    return transformer(model).parameters().total


@pytest.mark.parametrize(
    ("shape", "published"),
    [
        ({"ffn": 11008}, 6_738_415_616),
        ({"hidden": 5120, "layers": 40, "heads": 40, "ffn": 13824}, 13_015_864_320),
        ({"hidden": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "ffn": 28672}, 68_976_648_192),
        ({"ffn": 14336, **LLAMA_3}, 8_030_261_248),
        ({"hidden": 8192, "layers": 80, "heads": 64, "ffn": 28672, **LLAMA_3}, 70_553_706_496),
        ({"hidden": 16384, "layers": 126, "heads": 128, "ffn": 53248, **LLAMA_3}, 405_853_388_800),
    ],
    ids=["2-7B", "2-13B", "2-70B", "3-8B", "3-70B", "3.1-405B"],
)
def test_llamas_have_the_parameters_of_their_checkpoints(shape: dict[str, Any], published: int) -> None:
    assert model_parameters(llama(**shape)) == published


def test_gpt_3_has_175_billion_parameters() -> None:
    """Brown et al. 2020, table D.1: 174,600 million."""
    model = gpt(hidden=12288, layers=96, heads=96, vocabulary=50257, tied_embeddings=True)
    assert model_parameters(model) == pytest.approx(174.6e9, rel=1e-3)


@pytest.mark.parametrize(
    ("billions", "layers", "hidden"),
    [(1.7, 24, 2304), (3.6, 30, 3072), (7.5, 36, 4096), (18.4, 40, 6144), (39.1, 48, 8192), (76.1, 60, 10240),
     (145.6, 80, 12288), (310.1, 96, 16384), (529.6, 105, 20480), (1008.0, 128, 25600)],
)  # fmt: skip
def test_megatron_models_have_the_size_in_their_names(billions: float, layers: int, hidden: int) -> None:
    """Narayanan et al. 2021, table 1."""
    count = model_parameters(gpt(hidden=hidden, layers=layers, heads=32, tied_embeddings=True))
    assert count == pytest.approx(billions * 1e9, abs=0.06e9)


@given(st.integers(1, 64), st.integers(1, 40), st.integers(1, 500), st.integers(1, 500))
def test_a_gpt_has_12_l_h_squared_and_its_corrections(
    width: int, layers: int, vocabulary: int, sequence: int
) -> None:
    """Narayanan et al. 2021, equation 2: 12 l h² (1 + 13/12h + (V + s)/12lh); plus the final norm, 2h."""
    h = 4 * width
    shape = {"hidden": h, "layers": layers, "heads": 4, "vocabulary": vocabulary, "sequence": sequence}
    model = gpt(tied_embeddings=True, **shape)
    assert (
        model_parameters(model) == 12 * layers * h**2 + 13 * layers * h + (vocabulary + sequence) * h + 2 * h
    )
    assert model_parameters(but(model, tied_embeddings=False)) - model_parameters(model) == vocabulary * h


def test_only_queries_keys_and_values_may_have_biases() -> None:
    """As in Qwen2.5-32B: 32.76 billion parameters, 31.0 without embeddings."""
    model = llama(hidden=5120, layers=64, heads=40, kv_heads=8, ffn=27648, vocabulary=152064, qkv_bias=True)
    assert model_parameters(model) == 32_763_876_352


def block_parameters(model: ModelConfig) -> Parameters:
    found = parts(model)
    return found["attention"].parameters + found["mlp"].parameters


def test_norms_of_heads_are_two_heads_wide() -> None:
    grouped = llama(kv_heads=8)
    with_norms = block_parameters(but(grouped, qk_norm=True))
    assert with_norms == block_parameters(grouped) + Parameters(shared=0, replicated=2 * 128)


def test_tensor_parallelism_divides_matrices_and_keeps_norms_whole() -> None:
    block = block_parameters(gpt(hidden=64, heads=4))
    assert block == Parameters(shared=12 * 64**2 + 7 * 64, replicated=6 * 64)
    assert block.on_device(Degrees(tensor=4)) == (12 * 64**2 + 7 * 64) // 4 + 6 * 64


def test_a_tied_head_needs_a_copy_only_if_the_embedding_is_on_another_rank() -> None:
    """The first and the last stage of a V are on one rank."""

    def parameters_of_head(**parallel: Any) -> int:
        return estimate_layers(preset_config("gpt-1.5b", **parallel))[-1].parameters

    config = preset_config("gpt-1.5b")
    table, norm = config.model.vocabulary * config.model.hidden, 2 * config.model.hidden
    tied = but(config, model=but(config.model, tied_embeddings=True))
    assert tied.placement == "v"
    assert estimate_layers(tied)[-1].parameters == norm
    loop = but(tied, parallel=but(tied.parallel, placement="loop"))
    assert estimate_layers(loop)[-1].parameters == table + norm
    assert parameters_of_head() == parameters_of_head(placement="v") == table + norm
