"""A model spec of torchtitan runs a plan; torchtitan itself is checked by ``make torchtitan``."""

from __future__ import annotations

from typing import Any

import pytest
from support import titan
from support.cut_models import cut_problem
from support.plans import searched, unit_problem
from support.rank_files import found_by
from zbv_worker.errors import InvalidRun

from examples.torchtitan.hook import module_names, part_of, with_plan

Seen = list[dict[str, Any]]
NAMES = ["tok_embeddings", *(f"layers.{at}" for at in range(titan.BLOCKS)), "norm", "lm_head"]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What four ranks saw: two in each of two pipelines, whose stages are divided by ``fully_shard``."""
    folder = tmp_path_factory.mktemp("titan")
    problems = {
        "plan.json": unit_problem(2, 4),
        "layers.json": cut_problem(NAMES, (3, 1, 1, 2), (False, True, True, True)),
    }
    for name, problem in problems.items():
        searched(problem).save(folder / name)
    return found_by("titan_rank", 4, folder)


@pytest.mark.parametrize("case", ["float32", "recomputed"])
def test_gradients_and_losses_of_two_steps_are_those_of_one_process(seen: Seen, case: str) -> None:
    for rank in seen:
        assert rank[case]["apart"] < 1e-5
        assert max(rank[case]["loss"], default=0.0) < 1e-5
        assert rank[case]["evaluated"] < 1e-5
    assert [len(rank[case]["loss"]) for rank in seen] == [2, 2, 0, 0]


def test_a_plan_made_from_layers_cuts_the_model(seen: Seen) -> None:
    blocks = [{n[7] for n in rank["recomputed"]["names"] if n.startswith("layers.")} for rank in seen]
    assert blocks == [{"0", "1"}] * 2 + [{"2", "3"}] * 2


def test_parameters_in_half_precision_sum_their_gradients_in_float32(seen: Seen) -> None:
    assert max(rank["bfloat16"]["apart"] for rank in seen) < 0.05


def test_ranks_have_their_ends_of_the_v_and_only_their_parameters(seen: Seen) -> None:
    assert [rank["float32"]["has"] for rank in seen] == [[True, True]] * 2 + [[False, False]] * 2
    ends = seen[0]["float32"]["names"]
    assert "tok_embeddings.weight" in ends
    assert "lm_head.weight" in ends
    assert not set(ends) & set(seen[2]["float32"]["names"])
    everything = {name for name, _ in titan.Decoder().named_parameters()}
    assert set(ends) | set(seen[2]["float32"]["names"]) == everything


def test_subclasses_of_linear_are_split_also_if_fully_shard_was_applied_to_them(seen: Seen) -> None:
    assert set(seen[0]["float32"]["split"]) == {"Linear", "FSDPLinear"}


def test_configurations_that_do_not_fit_the_plan_are_refused_with_the_remedy(seen: Seen) -> None:
    for rank in seen:
        refused = rank["refused"]
        assert "found 3 microbatches per step; the plan has 4" in refused["microbatches"]
        assert "Set training.local_batch_size to 4" in refused["microbatches"]
        assert "Set parallelism.num_pp_microbatches to 4" in refused["newer microbatches"]
        assert "Set parallelism.pipeline_parallel_schedule to 'ZBVZeroBubble'" in refused["schedule"]
        assert "Set compile.components to ['loss']" in refused["compiled"]
        assert "module_fqns_per_model_part has 1 stages with the modules norm;" in refused["modules"]
        assert "is outside of fully_shard" in refused["not sharded"]
    assert "Set parallelism.pipeline_parallel_degree to 2" in seen[0]["refused"]["ranks"]


def test_a_part_has_only_its_modules_with_their_names() -> None:
    model = titan.Decoder()
    assert module_names(model) == NAMES
    part: Any = part_of(model, ["layers.2", "norm"])
    assert {name.split(".weight")[0] for name, _ in part.named_parameters() if name.endswith("weight")} == {
        "layers.2.norm",
        "layers.2.up",
        "layers.2.down",
        "norm",
    }
    assert len(model.layers) == 4


def test_models_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(InvalidRun, match="without a pipelining_fn"):
        with_plan(titan.ModelSpec(pipelining_fn=None), "plan.json")
    with pytest.raises(InvalidRun, match=r"found no plan; .* Pass a plan, its file, or its id"):
        with_plan(titan.ModelSpec(), None)
    with pytest.raises(InvalidRun, match="found a Linear with 0 ModuleDicts"):
        module_names(titan.Linear(2, 2))
    model: Any = titan.Decoder()
    model.vision_encoder = titan.Linear(2, 2)
    with pytest.raises(InvalidRun, match="and a vision encoder"):
        module_names(model)
