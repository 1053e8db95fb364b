"""The GPT is the same model for every partition."""

from __future__ import annotations

import pytest
import torch
from torch import nn
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
def test_any_number_of_stages_is_the_same_model(layers: int) -> None:
    """With the same initial parameters; two neighbours of a finer cut have the layers of one stage."""
    model, whole = small(layers), parameters(small(layers), 1)
    coarse = [[name for name, _ in model.build_stage(0, 1, CPU).named_children()]]
    for n_stages in (2, 4, 8):
        cut = parameters(model, n_stages)
        assert list(cut) == list(whole)
        assert all(torch.equal(whole[name], cut[name]) for name in whole)
        stages = [model.build_stage(stage, n_stages, CPU) for stage in range(n_stages)]
        fine = [[name for name, _ in stage.named_children()] for stage in stages]
        assert coarse == [one + next_one for one, next_one in zip(fine[::2], fine[1::2], strict=True)]
        coarse = fine


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
