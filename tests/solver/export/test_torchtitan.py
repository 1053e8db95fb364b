"""torchtitan's settings: one text for every version that there is, of a plan or of a cut."""

from __future__ import annotations

from collections.abc import Callable
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
from zbv_solver.problem.problem import Problem, W
from zbv_solver.search.assemble import make_plan

NAMES = ["embedding", *(f"block.{copy}" for copy in range(6)), "head"]
PARTS = ["embedding", "block.attention", "block.mlp", "head"]
each_version = pytest.mark.parametrize("version", VERSIONS)


def cut_plan(names: list[str], recomputed: tuple[bool, ...]) -> Plan:
    problem = cut_problem(names, (len(names) // 4,) * 4, recomputed)
    return make_plan(problem, random_orders(problem, Random(1)), method="random")


# --- of a plan


@given(problems(kinds=("v", "loop", "single"), loop_chunks=(2, 3)), st.randoms(use_true_random=True))
def test_the_settings_fit_the_plan(problem: Problem, random: Random) -> None:
    plan = make_plan(problem, random_orders(problem, random), method="random")
    if problem.placement.chunks == 3:  # torchtitan counts such stages by the names of their modules
        with pytest.raises(InvalidInput, match=r"/problem/chunks: found 3.*torch-csv"):
            export(plan, "torchtitan")
        return
    text = export(plan, "torchtitan")
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


@pytest.mark.parametrize(
    ("names", "recomputed", "checkpoint", "note"),
    [
        (NAMES, (False,) * 4, None, ""),
        (NAMES, (True,) * 4, FULL, ""),
        (NAMES, (False, True, False, True), None, "# Planned to be recomputed: 1, 3."),
        (PARTS, (False,) * 4, None, '#   2: ["block.mlp"]'),
    ],
)
def test_modules_and_recomputation_are_torchtitans_or_listed_for_the_reader(
    names: list[str], recomputed: tuple[bool, ...], checkpoint: str | None, note: str
) -> None:
    text = export(cut_plan(names, recomputed), "torchtitan")
    config = configured(text, "newer")
    expected = module_names(("Et", "tt", "tt", "tL")) if names is NAMES else None
    assert config.parallelism.module_fqns_per_model_part == expected
    assert config.activation_checkpoint == checkpoint
    assert note in text.splitlines()
    assert ("checkpoint yourself" in text) == ("recomputed" in note)
    assert ("#   2: " in text) == (names is PARTS)


@pytest.mark.parametrize(
    ("modules", "expected", "is_foreign"), [(("op",), SELECTIVE, False), (("mlp", "moe_act"), None, True)]
)
def test_what_torchtitan_recomputes_of_a_block_are_its_own_operations(
    modules: Any, expected: str | None, is_foreign: bool
) -> None:
    """Recomputation of whole blocks would take longer than planned."""
    cut = cut_problem(NAMES, (4, 4), (True, True), placement="single")
    assert cut.model is not None
    model = replace(cut.model, model=replace(cut.model.model, recompute_modules=modules))
    orders = order_of("1f1b", cut.placement, cut.microbatches)
    text = export(make_plan(replace(cut, model=model), orders, method="by hand"), "torchtitan")
    assert configured(text, "newer").activation_checkpoint == expected
    assert (f"recomputed: {', '.join(modules)} of the stages 0, 1." in text) == is_foreign


# --- of a cut


def test_modules_are_named_like_torchtitans() -> None:
    # _generate_llm_fqn_per_model_part(2, 3, input_weight=2, output_weight=2) of torchtitan's
    # distributed/pipeline_parallel.py: 7 effective layers, of which the first stage has 4.
    ends = ["tok_embeddings", "layers.0"]
    assert module_names(("Ett", "tL")) == [[*ends, "layers.1"], ["layers.2", "norm", "lm_head"]]
    first, last = module_names(("vvEt", "tL"))
    assert (first[0], first[-2:], last) == ("vision_encoder", ends, ["layers.1", "norm", "lm_head"])
    assert len(set(first)) == len(first), "a vision encoder is in the first stage once"


@each_version
@pytest.mark.parametrize(
    ("recompute", "is_split", "expected"),
    [("none", False, None), ("all", False, FULL), ("selective", False, SELECTIVE), (None, False, UNTOUCHED),
     (None, True, UNTOUCHED)],
)  # fmt: skip
def test_a_configuration_gets_the_pipeline(
    version: str, recompute: str | None, is_split: bool, expected: str | None
) -> None:
    parts = None if is_split else module_names(("Ett", "t", "ttt", "tL"))
    config = configured(TitanSettings(2, "Interleaved1F1B", 8, parts, recompute, is_split).text(), version)
    own = config.parallelism
    assert (own.pipeline_parallel_degree, own.pipeline_parallel_schedule) == (2, "Interleaved1F1B")
    assert own.module_fqns_per_model_part == parts
    assert (config.training.local_batch_size if version == "0.3.0" else own.num_pp_microbatches) == 8
    assert config.training.disable_cuda_graphs is True
    assert config.activation_checkpoint == expected
    assert config.compile.enable == (False if is_split else UNTOUCHED)


@each_version
@pytest.mark.parametrize(("ranks", "experts"), [(1, 1), (2, 1), (1, 4)])
def test_sizes_are_in_the_units_of_the_version_and_graphs_need_a_single_rank_without_experts(
    version: str, ranks: int, experts: int
) -> None:
    sizes, keys = StepSizes(sequence=128, microbatch_size=2, total=24), {}
    if experts > 1:
        keys = {"parallelism.expert_parallel_degree": experts}
    config = configured(TitanSettings(ranks, "1F1B", 4, batch=sizes, keys=keys).text(), version)
    training = config.training
    if version == "0.3.0":
        # Without a pipeline, a batch is a microbatch, and torchtitan accumulates gradients.
        assert training.local_batch_size == (8 if ranks > 1 else 2)
        assert config.parallelism.pipeline_parallel_microbatch_size == (2 if ranks > 1 else 1)
        assert (training.global_batch_size, training.seq_len) == (24, 128)
    else:
        assert training.num_tokens_per_microbatch_per_dp_rank == 256
        assert (training.num_tokens_per_train_step, training.max_context_length) == (24 * 128, 128)
    assert config.parallelism.expert_parallel_degree == keys.get("parallelism.expert_parallel_degree")
    assert training.disable_cuda_graphs == (True if ranks > 1 or experts > 1 else None)
    assert (config.parallelism.pipeline_parallel_schedule is None) == (ranks == 1)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (lambda: module_names(("EttL", "")), "stage 1 is empty"),
        (lambda: module_names(("Ett", "mL")), "module 'm' in stage 1"),
        (TitanSettings(2, "1F1B", 4, recompute="per-stage").text, "all stages alike"),
        (TitanSettings(2, "1F1B", 4, recompute="selective", is_split=True).text, "refuses SelectiveAC"),
    ],
)
def test_what_torchtitan_cannot_run_is_refused(text: Callable[[], Any], rule: str) -> None:
    with pytest.raises(InvalidInput, match=rule):
        text()
