"""Parameter counts, against published figures."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.estimates import but, gpt, parts, preset_config
from zbv_models.estimate.config import estimate_layers
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.model_layers import parameters_of
from zbv_models.estimate.shapes import Degrees, Parameters


def model_parameters(model: Transformer) -> int:
    return parameters_of(model).total


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


def block_parameters(model: Transformer) -> Parameters:
    found = parts(model)
    return found["attention"].parameters + found["mlp"].parameters


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
