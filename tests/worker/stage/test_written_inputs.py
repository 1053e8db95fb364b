"""A stage that begins with a layer that writes to its input trains as the uncut layers do, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.functions import Function
from support.gradients import gradients
from support.stages import run_step
from torch import Tensor, nn
from zbv_worker.errors import ModelError
from zbv_worker.stage.stage import Stage

WIDTH, MICROBATCHES = 6, 3
TARGET = torch.ones(2, WIDTH, dtype=torch.float64)
Change = Callable[[Any], Any]


def maps(function: Change) -> nn.Module:
    return Function(lambda _, x: function(x))


def written_behind_a_view(x: Tensor) -> Tensor:
    x[:, 1:3].mul_(3)
    return x


def with_nothing_saved(x: Tensor) -> Tensor:
    x += 1
    return x


def first_written(x: dict[str, Any]) -> dict[str, Any]:
    x["a"].mul_(2)
    return {**x, "b": x["a"] + x["b"]}


def containers_changed(x: dict[str, Any]) -> dict[str, Any]:
    x["kept"] = x["a"]
    x["b"].relu_()
    return x


def one_twice(x: dict[str, Any]) -> dict[str, Any]:
    both = x["a"] + x["b"]
    return {**x, "a": both, "b": both}


PLAIN: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "tanh": nn.Tanh,  # saves its output
    "sine": lambda: maps(torch.sin),  # saves its input
    "relu": lambda: nn.ReLU(inplace=True),
    "view": lambda: maps(written_behind_a_view),
    "add": lambda: maps(with_nothing_saved),
    "identity": nn.Identity,
}
NESTED: dict[str, Callable[[], nn.Module]] = {
    "first": lambda: maps(first_written),
    "containers": lambda: maps(containers_changed),
    "mask": lambda: maps(lambda x: {**x, "mask": x["mask"].logical_not_()}),
    "exchange": lambda: maps(lambda x: {**x, "a": x["b"], "b": x["a"]}),
    "sine": lambda: maps(lambda x: {**x, "b": x["b"].sin()}),
    "same": lambda: maps(one_twice),
}
OPENING = maps(lambda x: {"a": x * 2, "b": x.cos(), "mask": x.detach() > 0})
CLOSING = maps(lambda x: torch.where(x["mask"], x["a"], x["b"]) + x["a"])


def reference(layers: nn.Sequential, batch: Sequence[Tensor], *, needs_gradient: bool) -> dict[str, Any]:
    losses = []
    for x in batch:
        given = x.clone().requires_grad_(needs_gradient).clone()
        loss = nnf.mse_loss(layers(given), TARGET)
        torch.autograd.backward(loss / MICROBATCHES)
        losses.append(loss.detach())
    return {"losses": losses} | gradients(layers)


def in_stages(layers: nn.Sequential, batch: Any, cuts: Sequence[int], *, split: bool) -> dict[str, Any]:
    """All stages on one rank, which hand over values in the same memory; all F's come first."""
    ends = [*cuts, len(layers)]
    pieces = [nn.Sequential(*list(layers)[begin:end]) for begin, end in zip([0, *cuts], ends, strict=True)]
    stages = []
    for index, piece in enumerate(pieces):
        loss = nnf.mse_loss if index == len(pieces) - 1 else None
        stages.append(Stage(index, len(pieces), piece, MICROBATCHES, loss))
    losses = run_step(stages, [(x, TARGET, {}) for x in batch], split=split)
    for x in batch:
        value: Any = x
        for stage in stages:
            value = stage.evaluate(value, TARGET)
    return {"losses": losses} | gradients(layers)


def unless_refused(run: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """What it returns, or None if autograd has saved what was written to."""
    try:
        return run()
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return None


def compare(layers: nn.Sequential, cuts: Sequence[int], *, split: bool, may_refuse: bool = False) -> None:
    layers, batch = layers.double(), torch.randn(MICROBATCHES * 2, WIDTH).double()
    before, parts = batch.clone(), batch.chunk(MICROBATCHES)
    expected, with_gradient = (
        unless_refused(partial(reference, copy.deepcopy(layers), parts, needs_gradient=needs_gradient))
        for needs_gradient in (False, True)
    )
    try:
        found = unless_refused(partial(in_stages, layers, parts, cuts, split=split))
    except ModelError:
        if not may_refuse:
            raise
        return
    if found is None:  # the input of a stage needs a gradient, even if nothing before it is trained
        assert with_gradient is None
        return
    assert expected is not None, "trained on numbers that autograd refuses"
    torch.testing.assert_close(found, expected)
    assert torch.equal(batch, before), "the user's batch was changed"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_stages_train_as_the_uncut_layers_do(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(PLAIN)), min_size=1, max_size=5), "layers")
    layers = nn.Sequential(*(PLAIN[name]() for name in names), nn.Linear(WIDTH, WIDTH))
    cuts = data.draw(st.sets(st.integers(1, len(layers) - 1)), "cuts")
    compare(layers, sorted(cuts), split=data.draw(st.booleans(), "split"))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_nested_values_may_be_written_to(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(NESTED)), min_size=1, max_size=4), "layers")
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    layers = nn.Sequential(first, OPENING, *(NESTED[name]() for name in names), CLOSING, last)
    cuts = data.draw(st.sets(st.integers(1, len(layers) - 1)), "cuts")
    compare(
        layers,
        sorted(cuts),
        split=data.draw(st.booleans(), "split"),
        may_refuse="same" in names or "containers" in names,
    )


def test_a_layer_may_begin_to_write_later() -> None:
    """A dropout that was switched off writes from the moment when it is switched on."""
    layer = nn.Dropout(0.5, inplace=True).eval()
    stage, x = Stage(1, 3, layer, 1), TARGET.clone()
    stage.forward(0, x.clone(), split=False)
    assert torch.equal(stage.backward(0, x), x)
    layer.train()
    output = stage.forward(0, x.clone(), split=False)
    assert torch.equal(stage.backward(0, x), output)


def test_recomputed_stages_refuse_what_another_stage_has_written_to() -> None:
    """The next stage on the same rank got the memory that this one is recomputed from."""
    stages = [
        Stage(0, 3, nn.Linear(WIDTH, WIDTH).double(), 1),
        Stage(1, 3, nn.Identity(), 1, is_recomputed=True),
    ]
    last = Stage(2, 3, nn.ReLU(inplace=True), 1, nnf.mse_loss)
    x = torch.randn(2, WIDTH).double()
    for stage in stages:
        x = stage.forward(0, x, split=False)
    last.forward(0, x, TARGET, split=False)
    with pytest.raises(ModelError, match="wrote to a tensor that a layer before it passed on"):
        stages[1].backward(0, last.backward(0, None))
