"""Layers in any form become a model that every rank can cut and build alike."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from zbv_worker.errors import InvalidRun
from zbv_worker.model.checks import build_layers, layer_names
from zbv_worker.model.layer_list import LayerList, as_layered, even_partition, whole_name
from zbv_worker.models.gpt import gpt

CPU, META = torch.device("cpu"), torch.device("meta")


def linears(n: int) -> list[nn.Module]:
    return [nn.Linear(3, 3) for _ in range(n)]


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        (linears(2), ["0", "1"]),
        ((nn.ReLU, nn.Tanh), ["0", "1"]),
        (nn.Sequential(*linears(2)), ["0", "1"]),
        (nn.ModuleList(linears(1)), ["0"]),
        (nn.ModuleDict({"first": nn.ReLU(), "second": nn.Tanh()}), ["first", "second"]),
        ({"block.0": nn.ReLU, "head": nn.Tanh()}, ["block.0", "head"]),
        (gpt(layers=1), ["embedding", "block.0", "head"]),
    ],
)
def test_every_form_has_names(layers: Any, names: list[str]) -> None:
    assert list(layer_names(as_layered(layers))) == names


def test_parameters_have_the_names_of_the_whole_sequential() -> None:
    whole = nn.Sequential(*linears(4), nn.Sequential(*linears(2)))
    layered = as_layered(whole)
    parts = [build_layers(layered, names, CPU) for names in (["0", "1"], ["2"], ["3", "4"])]
    found = {name: tensor for part in parts for name, tensor in part.state_dict().items()}
    torch.testing.assert_close(found, dict(whole.state_dict()), rtol=0, atol=0)


def test_dots_in_names_come_back() -> None:
    built = build_layers(as_layered({"block.0": nn.Linear(2, 2)}), ["block.0"], CPU)
    assert [whole_name(name) for name, _ in built.named_parameters()] == ["block.0.weight", "block.0.bias"]


def test_given_modules_are_used_and_untouched_ones_are_copies() -> None:
    given = nn.Linear(2, 2)
    layered = LayerList({"0": given})
    assert layered.build_layers(["0"], CPU)[0] is given
    copied = layered.untouched().build_layers(["0"], CPU)[0]
    assert copied.weight is not given.weight
    torch.testing.assert_close(copied.weight, given.weight)


def test_functions_build_the_same_layer_wherever_they_are_built() -> None:
    layers = as_layered([partial(nn.Linear, 3, 3) for _ in range(4)], seed=5)
    whole = layers.build_layers(layers.layer_names(), CPU)
    other = as_layered([partial(nn.Linear, 3, 3)], seed=6)
    drawn = [module.get_parameter("weight").tolist() for module in (*whole, *other.build_layers(["0"], CPU))]
    assert layers.build_layers(["3"], CPU)[0].get_parameter("weight").tolist() == drawn[3]
    assert all(drawn.count(each) == 1 for each in drawn)


def test_the_seed_is_torchs_by_default_and_its_generator_is_not_used_up() -> None:
    torch.manual_seed(7)
    layers = as_layered([partial(nn.Linear, 3, 3)])
    built = layers.build_layers(["0"], CPU)
    drawn = torch.rand(1)
    torch.manual_seed(7)
    torch.testing.assert_close(torch.rand(1), drawn)
    seeded = as_layered([partial(nn.Linear, 3, 3)], seed=7)
    torch.testing.assert_close(built[0].weight, seeded.build_layers(["0"], CPU)[0].weight)


def test_without_memory_given_modules_keep_their_values() -> None:
    given = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    given[0].bias.requires_grad_(False)
    built = as_layered([given, partial(nn.Linear, 2, 2)]).build_layers(["0", "1"], META)
    assert {tensor.device for tensor in built.state_dict().values()} == {META}
    assert given[0].weight.device == CPU
    assert [built.get_parameter(f"0.0.{name}").requires_grad for name in ("weight", "bias")] == [True, False]


def test_shared_parameters_are_tied() -> None:
    shared = nn.Linear(3, 3)
    other = nn.Linear(3, 3, bias=False)
    other.weight = shared.weight
    tied = LayerList({"a": shared, "b": nn.ReLU(), "c": shared, "d": other}).tied_parameters()
    assert tied == [("a.weight", "c.weight"), ("a.bias", "c.bias"), ("a.weight", "d.weight")]
    assert layer_names(as_layered(nn.Sequential(shared, nn.ReLU(), shared))) == ("0", "1", "2")


def test_stages_have_about_equal_numbers_of_layers() -> None:
    assert even_partition("abcde", 2) == (("a", "b"), ("c", "d", "e"))
    assert even_partition("abc", 3) == (("a",), ("b",), ("c",))
    stages = [LayerList(dict.fromkeys("abc", nn.ReLU)).build_stage(stage, 2, CPU) for stage in range(2)]
    assert [len(stage) for stage in stages] == [1, 2]


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([], "found no layers"),
        ({"": nn.ReLU}, "found the name ''"),
        ({"a/b": nn.ReLU}, "found the name 'a/b'"),
        ([nn.ReLU, 3], "layer 1: found a int; must be an nn.Module, or a function"),
        (nn.Linear(2, 2), "found a Linear; must be a list of layers"),
        ("layers", "found a str; must be a list of layers"),
        ([torch.relu], "layer 0: calling it without arguments failed: TypeError"),
        ([nn.Linear], "layer 0: calling it without arguments failed: TypeError"),
        ([dict], "layer 0: the function returned a dict"),
    ],
)
def test_anything_else_is_refused(layers: Any, said: str) -> None:
    with pytest.raises(InvalidRun, match=said):
        as_layered(layers).build_layers(["0"], CPU)


@pytest.mark.parametrize("part", [slice(None), slice(2)])
def test_different_parameters_with_common_memory_are_refused(part: slice) -> None:
    """On one rank an update of one would change the other, and on two ranks it would not."""
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = nn.Parameter(first.weight.data[part])
    said = r"a\.weight and b\.weight are different parameters with common memory"
    with pytest.raises(InvalidRun, match=said):
        LayerList({"a": first, "b": second}).tied_parameters()
    flat = torch.randn(18)
    first.weight, second.weight = (nn.Parameter(half.view(3, 3)) for half in flat.chunk(2))
    assert LayerList({"a": first, "b": second}).tied_parameters() == []


def test_functions_that_return_modules_are_tied(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "norm": nn.BatchNorm1d(3)})
    calls: list[str] = []

    def failing() -> nn.Module:
        calls.append("failing")
        raise OSError(len(model))

    def new() -> nn.Module:
        calls.append("new")
        return nn.Linear(3, 3)

    def around() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(3), model["a"], nn.Linear(len(model), 3))

    functions = {"a": lambda: model["a"], "b": failing, "c": new, "d": around, "e": lambda: model["norm"]}
    layers = LayerList({**functions, "f": partial(copy.deepcopy, model["a"]), "g": model["norm"]})
    names = [
        ("a.weight", "d.1.weight"),
        ("a.bias", "d.1.bias"),
        ("e.weight", "g.weight"),
        ("e.bias", "g.bias"),
    ]
    assert layers.tied_parameters()[: len(names)] == names
    assert all(one.partition(".")[0] == "e" for one, _ in layers.tied_parameters()[len(names) :])
    assert "a layer's function fails on the meta device (OSError: 2" in caplog.text
    assert "new" not in calls  # it may take long, and cannot share anything
    assert isinstance(model["norm"].running_mean, torch.Tensor)


def test_buffers_of_a_module_that_is_used_twice_are_tied() -> None:
    norm = nn.BatchNorm1d(3, affine=False)
    tied = [first for first, _ in LayerList({"a.0": norm, "b": norm}).tied_parameters()]
    assert tied == ["a.0.running_mean", "a.0.running_var", "a.0.num_batches_tracked"]
