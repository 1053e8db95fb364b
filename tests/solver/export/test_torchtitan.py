"""torchtitan's settings: one text for every version that there is, of a plan or of a cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cut_models import cut_problem
from support.orders import random_orders
from support.problems import problems
from support.titan_configuration import FULL, SELECTIVE, UNTOUCHED, VERSIONS, configured
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from zbv_solver.construct.baselines import order_of
from zbv_solver.errors import InvalidInput
from zbv_solver.export import export
from zbv_solver.export.torchtitan import StepSizes, TitanSettings, module_names
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.problem import W
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.assemble import make_plan

plans = st.builds(
    lambda problem, random: make_plan(problem, random_orders(problem, random), method="random"),
    problems(kinds=("v", "loop", "single"), loop_chunks=(2,)),  # torchtitan cannot describe more
    st.randoms(use_true_random=True),
)
NAMES = ["embedding", *(f"block.{copy}" for copy in range(6)), "head"]
each_version = pytest.mark.parametrize("version", VERSIONS)


def cut_plan(names: list[str], sizes: Sequence[int], recomputed: Sequence[bool]) -> Plan:
    problem = cut_problem(names, tuple(sizes), tuple(recomputed))
    return make_plan(problem, random_orders(problem, Random(1)), method="random")


# --- of a plan


@given(plans)
def test_the_settings_fit_the_plan(plan: Plan) -> None:
    text, problem = export(plan, "torchtitan"), plan.problem
    config = configured(text, "newer")
    own, is_split = config.parallelism, bool((plan.orders.letter == W).any())
    assert config.compile.enable == (False if is_split else UNTOUCHED)
    assert config.activation_checkpoint == (None if is_split else UNTOUCHED)
    assert own.pipeline_parallel_degree == problem.pp_degree
    if problem.pp_degree == 1:
        assert own.pipeline_parallel_schedule_csv is None
        return
    assert Path(own.pipeline_parallel_schedule_csv).read_text() == export(plan, "torch-csv")
    assert own.num_pp_microbatches == problem.microbatches
    assert configured(text, "0.3.0").training.local_batch_size == problem.microbatches

    cut_by = get_schedule_class(own.pipeline_parallel_schedule)
    assert (cut_by is ScheduleZBVZeroBubble) == (problem.placement.kind == "v")
    assert issubclass(cut_by, PipelineScheduleSingle) == (problem.placement.chunks == 1)


def test_more_than_two_stages_per_rank_need_named_modules() -> None:
    costs = {"forward": 1, "backward_input": 1, "backward_weight": 1}
    document = {"pp_degree": 2, "microbatches": 1, "placement": "loop", "chunks": 3, "costs": costs}
    problem = parse_problem(document)
    plan = make_plan(problem, random_orders(problem, Random(1)), method="random")
    with pytest.raises(InvalidInput, match=r"/problem/chunks: found 3.*torch-csv"):
        export(plan, "torchtitan")


@pytest.mark.parametrize("is_known", [True, False])
def test_layers_are_torchtitans_modules_or_listed_for_the_reader(is_known: bool) -> None:
    names = NAMES if is_known else ["embedding", "block.attention", "block.mlp", "head"]
    text = export(cut_plan(names, (len(names) // 4,) * 4, [False] * 4), "torchtitan")
    parts = configured(text, "newer").parallelism.module_fqns_per_model_part
    assert parts == (module_names(("Et", "tt", "tt", "tL")) if is_known else None)
    assert ('#   2: ["block.mlp"]' in text.splitlines()) == (not is_known)


@pytest.mark.parametrize(
    ("recomputed", "expected", "is_said"),
    [([False] * 4, None, False), ([True] * 4, FULL, False), ([False, True, False, True], None, True)],
)
def test_torchtitan_recomputes_all_stages_or_none(
    recomputed: list[bool], expected: str | None, is_said: bool
) -> None:
    text = export(cut_plan(NAMES, (2, 2, 2, 2), recomputed), "torchtitan")
    assert configured(text, "newer").activation_checkpoint == expected
    assert ("# Planned to be recomputed: 1, 3." in text) == is_said == ("checkpoint yourself" in text)


@pytest.mark.parametrize(
    ("modules", "expected", "is_said"), [(("op",), SELECTIVE, False), (("mlp", "moe_act"), None, True)]
)
def test_what_torchtitan_recomputes_of_a_block_are_its_own_operations(
    modules: Any, expected: str | None, is_said: bool
) -> None:
    """Recomputation of whole blocks would take longer than planned."""
    cut = cut_problem(NAMES, (4, 4), (True, True), placement="single")
    assert cut.model is not None
    model = replace(cut.model, model=replace(cut.model.model, recompute_modules=modules))
    orders = order_of("1f1b", cut.placement, cut.microbatches)
    text = export(make_plan(replace(cut, model=model), orders, method="by hand"), "torchtitan")
    assert configured(text, "newer").activation_checkpoint == expected
    assert (f"recomputed: {', '.join(modules)} of the stages 0, 1." in text) == is_said


# --- of a cut


def test_modules_are_named_like_torchtitans() -> None:
    # _generate_llm_fqn_per_model_part(2, 3, input_weight=2, output_weight=2) of torchtitan's
    # distributed/pipeline_parallel.py: 7 effective layers, of which the first stage has 4.
    assert module_names(("Ett", "tL")) == [
        ["tok_embeddings", "layers.0", "layers.1"],
        ["layers.2", "norm", "lm_head"],
    ]
    first, last = module_names(("vvEt", "tL"))
    assert (first[0], first[-2:]) == ("vision_encoder", ["tok_embeddings", "layers.0"])
    assert len(set(first)) == len(first), "a vision encoder is in the first stage once"
    assert last == ["layers.1", "norm", "lm_head"]


@each_version
@pytest.mark.parametrize(
    ("recompute", "is_split", "expected"),
    [
        ("none", False, None),
        ("all", False, FULL),
        ("selective", False, SELECTIVE),
        (None, False, UNTOUCHED),
        (None, True, UNTOUCHED),
    ],
)
def test_a_configuration_gets_the_pipeline(
    version: str, recompute: str | None, is_split: bool, expected: str | None
) -> None:
    parts = None if is_split else module_names(("Ett", "t", "ttt", "tL"))
    settings = TitanSettings(2, "Interleaved1F1B", 8, parts, recompute, is_split)
    config = configured(settings.text(), version)
    own = config.parallelism
    assert (own.pipeline_parallel_degree, own.pipeline_parallel_schedule) == (2, "Interleaved1F1B")
    assert own.module_fqns_per_model_part == parts
    count = config.training.local_batch_size if version == "0.3.0" else own.num_pp_microbatches
    assert count == 8
    assert config.training.disable_cuda_graphs is True
    assert config.activation_checkpoint == expected
    assert config.compile.enable == (False if is_split else UNTOUCHED)


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


def test_what_torchtitan_cannot_run_is_refused() -> None:
    for stages, rule in ((("EttL", ""), "stage 1 is empty"), (("Ett", "mL"), "module 'm' in stage 1")):
        with pytest.raises(InvalidInput, match=rule):
            module_names(stages)
    for settings, rule in (
        (TitanSettings(2, "1F1B", 4, recompute="per-stage"), "all stages alike"),
        (TitanSettings(2, "ZBVZeroBubble", 4, recompute="selective", is_split=True), "refuses SelectiveAC"),
    ):
        with pytest.raises(InvalidInput, match=rule):
            settings.text()
