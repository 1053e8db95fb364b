"""The GPT is the same model for every partition."""

from __future__ import annotations

from random import Random

import pytest
import torch
from support.gradients import relative_error
from support.plans import unit_problem
from support.selfcheck import random_orders, reference_gradients, run_in_threads
from torch import nn
from zbv_worker.execution.build_stages import build_modules
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.model.protocol import PipelineModel
from zbv_worker.models.gpt import GPT, gpt
from zbv_worker.models.text import VOCABULARY, sample, standard_library_text

CPU = torch.device("cpu")


def small(layers: int = 4, seed: int = 0) -> GPT:
    return gpt(layers=layers, width=32, heads=2, length=16, sequences=2, characters=20_000, seed=seed)


def parameters(model: GPT, n_stages: int) -> dict[str, torch.Tensor]:
    stages: list[nn.Module] = [model.build_stage(stage, n_stages, CPU) for stage in range(n_stages)]
    return {name: parameter.detach() for stage in stages for name, parameter in stage.named_parameters()}


@pytest.mark.parametrize("layers", [4, 5, 8])
@pytest.mark.parametrize("n_stages", [2, 4, 8])
def test_initial_parameters_do_not_depend_on_the_partition(layers: int, n_stages: int) -> None:
    whole = parameters(small(layers), 1)
    cut = parameters(small(layers), n_stages)
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


@pytest.mark.parametrize("layers", [4, 5, 8])
@pytest.mark.parametrize("p", [1, 2, 4])
def test_a_stage_covers_the_layers_of_two_stages_of_the_finer_cut(layers: int, p: int) -> None:
    model = small(layers)
    for stage in range(p):
        coarse = [name for name, _ in model.build_stage(stage, p, CPU).named_children()]
        fine = [
            name
            for half in (2 * stage, 2 * stage + 1)
            for name, _ in model.build_stage(half, 2 * p, CPU).named_children()
        ]
        assert coarse == fine


def test_seeds_change_parameters_and_data() -> None:
    model: PipelineModel = small(seed=1)
    name = "embedding.token.weight"
    assert not torch.equal(parameters(small(seed=0), 1)[name], parameters(small(seed=1), 1)[name])
    inputs = {model.microbatch(step, index)[0].numpy().tobytes() for step in range(3) for index in range(3)}
    assert len(inputs) == 9
    assert torch.equal(model.microbatch(1, 2)[0], small(seed=1).microbatch(1, 2)[0])


def test_targets_are_the_next_characters() -> None:
    text = standard_library_text(10_000)
    assert len(text) == 10_000
    assert int(text.max()) < VOCABULARY
    inputs, targets = sample(text, 3, 20, (1, 2))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert "import" in bytes(text.tolist()).decode()


def test_a_random_plan_computes_the_gradients_of_the_model() -> None:
    problem = unit_problem(2, 3)
    found, loss = run_in_threads(problem, random_orders(problem, Random(1)), small())
    reference, right = reference_gradients(small(), 3)
    assert relative_error(found, reference) <= 1e-5
    assert loss == pytest.approx(right, rel=1e-6)


def test_a_tied_head_shares_the_embedding_if_both_are_on_one_rank() -> None:
    problem = unit_problem(2, 3)
    plan = RankPlan.of("tied", problem, random_orders(problem, Random(1)), rank=0)
    names = "embedding.token.weight", "head.logits.weight"
    for tied in (True, False):
        model = gpt(layers=4, width=16, heads=2, length=8, sequences=1, characters=20_000, tied=tied)
        modules = build_modules(model, plan, CPU)
        found = modules[0].get_parameter(names[0]), modules[3].get_parameter(names[1])
        assert (found[0] is found[1]) == tied


def test_dropout_acts_only_in_training() -> None:
    model = gpt(layers=2, width=16, heads=2, length=8, sequences=1, characters=20_000, dropout=0.5)
    module = model.build_stage(0, 1, CPU)
    x, _ = model.microbatch(0, 0)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="heads must divide width"):
        gpt(width=10, heads=3)
