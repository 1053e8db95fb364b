"""torchtitan's settings: one text for every version that there is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.titan_configuration import FULL, SELECTIVE, UNTOUCHED, VERSIONS, configured
from zbv_solver.errors import InvalidInput
from zbv_solver.export.torchtitan import StepSizes, TitanSettings, module_names

MICROBATCHES = 8
each_version = pytest.mark.parametrize("version", VERSIONS)


def test_modules_are_named_like_torchtitans() -> None:
    # _generate_llm_fqn_per_model_part(2, 3, input_weight=2, output_weight=2) of torchtitan's
    # distributed/pipeline_parallel.py: 7 effective layers, of which the first stage has 4.
    assert module_names(("Ett", "tL")) == [
        ["tok_embeddings", "layers.0", "layers.1"],
        ["layers.2", "norm", "lm_head"],
    ]


def test_a_vision_encoder_is_in_the_first_stage_once() -> None:
    first, last = module_names(("vvEt", "tL"))
    assert first[0] == "vision_encoder"
    assert len(set(first)) == len(first)
    assert first[-2:] == ["tok_embeddings", "layers.0"]
    assert last == ["layers.1", "norm", "lm_head"]


@each_version
@given(st.lists(st.integers(1, 4), min_size=4, max_size=4), st.sampled_from(["none", "all"]))
def test_a_configuration_gets_the_pipeline(version: str, sizes: list[int], recompute: str) -> None:
    letters = ["t" * size for size in sizes]
    parts = module_names(("E" + letters[0], *letters[1:3], letters[3] + "L"))
    text = TitanSettings(2, "Interleaved1F1B", MICROBATCHES, parts, recompute).text()
    config = configured(text, version)
    own = config.parallelism
    assert (own.pipeline_parallel_degree, own.pipeline_parallel_schedule) == (2, "Interleaved1F1B")
    assert own.module_fqns_per_model_part == parts
    count = config.training.local_batch_size if version == "0.3.0" else own.num_pp_microbatches
    assert count == MICROBATCHES
    assert config.training.disable_cuda_graphs is True
    assert config.activation_checkpoint == (FULL if recompute == "all" else None)
    assert config.compile.enable == UNTOUCHED


@each_version
def test_compiled_blocks_are_turned_off_where_backwards_are_split(version: str) -> None:
    text = TitanSettings(2, "ZBVZeroBubble", MICROBATCHES, is_split=True).text()
    config = configured(text, version)
    assert config.compile.enable is False
    assert config.activation_checkpoint == UNTOUCHED
    assert config.parallelism.module_fqns_per_model_part is None


@each_version
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_sizes_of_a_batch_are_in_the_units_of_the_version(version: str, ranks: int) -> None:
    text = TitanSettings(ranks, "1F1B", 4, batch=StepSizes(sequence=128, microbatch_size=2, total=24)).text()
    training = configured(text, version).training
    if version == "0.3.0":
        # Without a pipeline, a batch is a microbatch, and torchtitan accumulates gradients.
        assert training.local_batch_size == (8 if ranks > 1 else 2)
        assert (training.global_batch_size, training.seq_len) == (24, 128)
    else:
        assert training.num_tokens_per_microbatch_per_dp_rank == 256
        assert (training.num_tokens_per_train_step, training.max_context_length) == (24 * 128, 128)


@each_version
@pytest.mark.parametrize("experts", [1, 4])
def test_without_a_pipeline_only_experts_forbid_captured_graphs(version: str, experts: int) -> None:
    text = TitanSettings(1, "1F1B", 4, keys={"parallelism.expert_parallel_degree": experts}).text()
    config = configured(text, version)
    assert config.parallelism.expert_parallel_degree == experts
    assert config.training.disable_cuda_graphs == (True if experts > 1 else None)
    assert config.parallelism.pipeline_parallel_schedule is None


@each_version
def test_operations_are_recomputed_if_backwards_are_whole(version: str) -> None:
    config = configured(TitanSettings(2, "1F1B", 4, recompute="selective").text(), version)
    assert config.activation_checkpoint == SELECTIVE
    with pytest.raises(InvalidInput, match="and refuses SelectiveAC"):
        TitanSettings(2, "ZBVZeroBubble", 4, recompute="selective", is_split=True).text()


def test_stages_that_torchtitan_cannot_run_are_refused() -> None:
    with pytest.raises(InvalidInput, match="stage 1 is empty"):
        module_names(("EttL", ""))
    with pytest.raises(InvalidInput, match="found module 'm' in stage 1"):
        module_names(("Ett", "mL"))
    with pytest.raises(InvalidInput, match="all stages alike"):
        TitanSettings(2, "1F1B", 4, recompute="per-stage").text()
