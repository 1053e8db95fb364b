"""Copies of a tied parameter on different ranks train as one parameter, or are refused with the reason."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.thread_pipeline import on_ranks, plan_of, returned
from torch import Tensor, nn
from zbv_worker.errors import InvalidRun, PeerLost, WorkerError
from zbv_worker.model.layer_list import LayerList
from zbv_worker.pipeline.pipeline import Pipeline

WIDTH, ROWS, STEPS = 4, 8, 3
Named = list[tuple[str, nn.Parameter]]
Optimizers = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizers] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3),
}
SETTINGS = ({"weight_decay": 0.0}, {"weight_decay": 0.5}, {"lr": 3e-3})


PLACEMENTS = [(2, "single", 1), (4, "single", 1), (2, "v", 1), (4, "v", 1), (2, "loop", 1), (2, "single", 2)]
"""Ranks, placement and replicas."""


def layers_of(seed: int, ties: Sequence[tuple[str, str]] = ()) -> dict[str, nn.Module]:
    """An embedding, blocks and a head, with some parameters shared."""
    torch.manual_seed(seed)
    layers: dict[str, nn.Module] = {"embedding": nn.Embedding(WIDTH, WIDTH)}
    for block in range(6):
        layers[f"block.{block}"] = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    layers["head"] = nn.Linear(WIDTH, WIDTH)
    for first, second in ties:
        (source, kind), (target, other) = (_holder(layers, name) for name in (first, second))
        setattr(target, other, getattr(source, kind))
    return layers


def _holder(layers: dict[str, nn.Module], name: str) -> tuple[nn.Module, str]:
    layer = next(layer for layer in layers if name.startswith(f"{layer}."))
    path, _, kind = name.removeprefix(f"{layer}.").rpartition(".")
    return layers[layer].get_submodule(path), kind


MATRICES = ["embedding.weight", *(f"block.{block}.1.weight" for block in range(6)), "head.weight"]
VECTORS = [
    *(f"block.{block}.{kind}" for block in range(6) for kind in ("0.weight", "0.bias", "1.bias")),
    "head.bias",
]


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(WIDTH, (ROWS, 3), generator=generator) for _ in range(2))  # type: ignore[return-value]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.mT, target)


def by_name(of: Callable[[str], int], named: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Groups that a user chooses by name, as many as there are settings."""
    groups: list[dict[str, Any]] = [{**settings, "params": []} for settings in SETTINGS]
    for name, parameter in named:
        groups[of(name)]["params"].append(parameter)
    return [group for group in groups if group["params"]]


def names_of(pipe: Pipeline) -> Iterator[tuple[str, nn.Parameter]]:
    """Every name of this rank, also of copies."""
    for module in pipe.modules.values():
        for name, parameter in module.named_parameters(remove_duplicate=False):
            yield name.replace("/", "."), parameter


def values(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in named}


def alone(
    layers: dict[str, nn.Module], groups: Callable[[Named], Any], optimizer: Optimizers
) -> dict[str, Tensor]:
    """The parameters after some steps in one process, by all of their names."""
    whole = nn.Sequential(*copy.deepcopy(layers).values())
    names = dict(zip(map(str, range(len(layers))), layers, strict=True))

    def named(**how: Any) -> Named:
        return [
            (f"{names[n.partition('.')[0]]}.{n.partition('.')[2]}", p)
            for n, p in whole.named_parameters(**how)
        ]

    made = optimizer(groups(named()))
    for step in range(STEPS):
        inputs, targets = batch(step)
        torch.autograd.backward(loss(whole(inputs), targets))
        made.step()
        made.zero_grad()
    return values(named(remove_duplicate=False))


def train(pipe: Pipeline, made: torch.optim.Optimizer, steps: int = STEPS) -> dict[str, Tensor]:
    for step in range(steps):
        pipe.step(*batch(step))
        made.step()
        made.zero_grad()
    return values(names_of(pipe))


def random_ties(choice: random.Random) -> list[tuple[str, str]]:
    """Some sets of equal parameters, each as pairs with its first in model order."""
    ties = []
    for kind in (MATRICES, VECTORS):
        names = list(kind)
        for _ in range(choice.randint(1, 2)):
            some = sorted(choice.sample(names, min(choice.randint(2, 4), len(names))), key=kind.index)
            names = [name for name in names if name not in some]
            ties += [(some[0], other) for other in some[1:]]
    return ties


def merged(ranks: list[Any]) -> dict[str, Tensor]:
    """What the ranks returned; raises the error of one that failed."""
    return {name: value for found in returned(ranks) for name, value in found.items()}


def run(place: tuple[int, str], layers: Any, program: Callable[[Pipeline], Any], **more: Any) -> list[Any]:
    """What a program returns or raises on every rank, each with its own layers."""
    return on_ranks(plan_of(*place), lambda: copy.deepcopy(layers), loss, program, **more)


def sgd(pipe: Pipeline) -> dict[str, Tensor]:
    return train(pipe, torch.optim.SGD(pipe.parameters(), lr=0.1))


def alone_with_sgd(layers: dict[str, nn.Module]) -> dict[str, Tensor]:
    return alone(layers, lambda named: [p for _, p in named], lambda made: torch.optim.SGD(made, lr=0.1))


def require_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(len(PLACEMENTS)))
def test_random_ties_train_as_in_one_process(seed: int) -> None:
    """Sets of ties, groups and frozen parameters by name, optimizers, placements and replicas."""
    choice = random.Random(seed)
    ties = random_ties(choice)
    layers = layers_of(seed, ties)
    optimizer = [*OPTIMIZERS.values()][seed % len(OPTIMIZERS)]
    settings = {name: choice.randrange(len(SETTINGS)) for name in (*MATRICES, *VECTORS)}
    frozen = {name for name in settings if choice.random() < 0.2}

    def groups(named: Named) -> list[dict[str, Any]]:
        for name, parameter in named:
            parameter.requires_grad_(name not in frozen)
        return by_name(settings.__getitem__, named)

    def program(pipe: Pipeline) -> dict[str, Tensor]:
        return train(pipe, optimizer(groups(list(pipe.named_parameters()))))

    ranks, placement, replicas = PLACEMENTS[seed]
    found = merged(run((ranks, placement), layers, program, replicas=replicas))
    require_equal(found, alone(layers, groups, optimizer))
    for first, second in ties:
        assert torch.equal(found[first], found[second])


def tied_head(embedding: nn.Embedding) -> nn.Linear:
    head = nn.Linear(WIDTH, WIDTH, bias=False)
    head.weight = embedding.weight
    return head


def of_a_model(layers: dict[str, nn.Module]) -> dict[str, Any]:
    """Functions that return the modules of a model, as in ``lambda: model.layers[3]``."""
    model = nn.ModuleList(layers.values())
    return {name: (lambda at=at: model[at]) for at, name in enumerate(layers)}


def of_parts(layers: dict[str, Any]) -> dict[str, Any]:
    """A function that builds a layer which shares a parameter of a given one."""
    return {**layers, "head": partial(tied_head, layers["embedding"])}


@pytest.mark.parametrize(
    ("placement", "form", "sparse"),
    [
        ("single", dict, True),
        ("single", of_a_model, False),
        ("v", of_a_model, True),
        ("single", of_parts, True),
        ("v", of_parts, False),
    ],
)
def test_functions_may_share_parameters(placement: str, form: Callable[[Any], Any], sparse: bool) -> None:
    """On the same rank or not, and with the gradient of a sparse embedding."""
    layers: dict[str, Any] = layers_of(0)
    layers["embedding"].sparse = sparse
    layers["head"] = tied_head(layers["embedding"])
    found = on_ranks(plan_of(2, placement), lambda: form(copy.deepcopy(layers)), loss, sgd)
    require_equal(merged(found), alone_with_sgd(layers))


def by_index(pipe: Pipeline) -> torch.optim.Optimizer:
    parameters = list(pipe.parameters())
    groups: list[dict[str, Any]]
    groups = [{"params": parameters[:3], "weight_decay": 0.5}, {"params": parameters[3:]}]
    return torch.optim.AdamW(groups)


def by_class(pipe: Pipeline) -> torch.optim.Optimizer:
    """As nanoGPT's first version: embeddings and norms do not decay."""
    modules = [module for stage in pipe.modules.values() for module in stage.modules()]
    decaying = {p: None for m in modules if isinstance(m, nn.Linear) for p in m.parameters(recurse=False)}
    others = [parameter for parameter in pipe.parameters() if parameter not in decaying]
    decays = ((list(decaying), 0.5), (others, 0.0))
    return torch.optim.AdamW([{"params": some, "weight_decay": decay} for some, decay in decays if some])


def another_optimizer(pipe: Pipeline) -> torch.optim.Optimizer:
    kind = torch.optim.SGD if has_first(pipe) else torch.optim.AdamW
    return kind(pipe.parameters(), lr=1e-3)


def left_out(pipe: Pipeline) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for name, p in names_of(pipe) if not name.startswith("head.w")], lr=1e-3)


def frozen_here(pipe: Pipeline) -> torch.optim.Optimizer:
    for name, parameter in names_of(pipe):
        parameter.requires_grad_(not name.startswith("head.w"))
    return torch.optim.AdamW(pipe.parameters())


def frozen_later(pipe: Pipeline) -> torch.optim.Optimizer:
    made = torch.optim.AdamW(pipe.parameters())
    train(pipe, made, steps=1)
    return frozen_here(pipe)


def faster_later(pipe: Pipeline) -> torch.optim.Optimizer:
    made = torch.optim.AdamW(pipe.parameters(), lr=1e-4)
    train(pipe, made, steps=1)
    if has_first(pipe):
        made.param_groups[0]["lr"] = 1.1e-4
    return made


def changed_by_hand(pipe: Pipeline) -> torch.optim.Optimizer:
    with torch.no_grad():
        for name, parameter in names_of(pipe):
            if name.startswith("head.w"):
                parameter.mul_(2)
    return torch.optim.AdamW(pipe.parameters())


def replaced(pipe: Pipeline) -> torch.optim.Optimizer:
    for module in pipe.modules.values():
        for name, layer in module.named_children():
            if name == "head":
                layer.weight = nn.Parameter(layer.get_parameter("weight").detach().clone())
    return torch.optim.AdamW(pipe.parameters())


def has_first(pipe: Pipeline) -> bool:
    return any(name.startswith("embedding") for name, _ in names_of(pipe))


REFUSED: dict[str, tuple[Callable[[Pipeline], torch.optim.Optimizer], str]] = {
    "by index": (by_index, "weight_decay=0.5"),
    "by class": (by_class, "weight_decay=0.0"),
    "other optimizers": (another_optimizer, "optimizer=SGD"),
    "left out": (left_out, "optimizer=None"),
    "frozen": (frozen_here, "requires_grad=False"),
    "frozen later": (frozen_later, "requires_grad=False"),
    "another rate later": (faster_later, "lr=0.00011"),
    "changed by hand": (changed_by_hand, "differs from embedding.weight on rank 0"),
    "replaced": (replaced, "replaced parameter=head.weight"),
}


@pytest.mark.parametrize("way", REFUSED)
def test_copies_that_are_treated_differently_are_refused_with_the_reason(way: str) -> None:
    """At the latest by the end of the pipeline, also after a single step; no rank waits for its timeout."""
    prepared, reason = REFUSED[way]
    layers = layers_of(1, [("embedding.weight", "head.weight")])
    for steps in (1, 2):

        def program(pipe: Pipeline, steps: int = steps) -> dict[str, Tensor]:
            return train(pipe, prepared(pipe), steps)

        found = run((2, "single"), layers, program)
        refusals = [str(each) for each in found if isinstance(each, InvalidRun)]
        assert refusals
        assert all(isinstance(each, InvalidRun | PeerLost) for each in found)
        assert all("embedding.weight" in each and "head.weight" in each for each in refusals)
        assert any(reason in each for each in refusals)


@pytest.mark.parametrize("way", ["by class", "frozen later", "replaced"])
def test_parameters_on_one_rank_are_one_parameter(way: str) -> None:
    """In a V nothing is refused, because there are no copies; nor if several ranks have no ties."""
    prepared, _ = REFUSED[way]

    def program(pipe: Pipeline) -> dict[str, Tensor]:
        return train(pipe, prepared(pipe), 2)

    for placement, ties in (("v", [("embedding.weight", "head.weight")]), ("single", [])):
        found = on_ranks(plan_of(2, placement), partial(layers_of, 1, ties), loss, program)
        assert "head.weight" in merged(found)


def test_rounding_of_a_copy_does_not_add_up() -> None:
    """Another thread count or another kind of device rounds differently."""
    layers = layers_of(1, [("embedding.weight", "head.weight")])

    def program(pipe: Pipeline) -> dict[str, Tensor]:
        made = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for _ in range(STEPS):
            train(pipe, made, 1)
            if not has_first(pipe):
                with torch.no_grad():
                    dict(pipe.named_parameters())["embedding.weight"].mul_(1 + 1e-6)
        pipe.evaluate(*batch(0))
        return values(names_of(pipe))

    found = merged(run((2, "single"), layers, program))
    assert torch.equal(found["embedding.weight"], found["head.weight"])


@pytest.mark.parametrize("call", ["evaluate", "full_state_dict", "checkpoints"])
def test_every_use_of_the_parameters_compares_the_copies(call: str, tmp_path: Path) -> None:
    layers = layers_of(1, [("embedding.weight", "head.weight")])

    def program(pipe: Pipeline) -> None:
        made = by_class(pipe)
        train(pipe, made, 1)
        if call == "evaluate":
            pipe.evaluate(*batch(0))
        elif call == "full_state_dict":
            pipe.full_state_dict()
        else:
            pipe.checkpoints(tmp_path, made).save(1)
        raise AssertionError("unlike copies were used")

    found = {type(each) for each in run((2, "single"), layers, program)}
    assert InvalidRun in found <= {InvalidRun, PeerLost}


@pytest.mark.parametrize("order", [(0, 1), (1, 2), (3, 0)])
def test_a_run_goes_on_with_other_ranks_and_placements(order: tuple[int, int], tmp_path: Path) -> None:
    """Copies have one optimizer state in a checkpoint, that of the first."""
    layers = layers_of(3, random_ties(random.Random(3)))

    def groups(named: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
        return by_name(lambda name: len(name) % 2, named)

    def program(pipe: Pipeline, until: int) -> dict[str, Tensor]:
        made = OPTIMIZERS["adamw"](groups(pipe.named_parameters()))
        for step in pipe.checkpoints(tmp_path, made).steps(until, every=1):
            pipe.step(*batch(step))
            made.step()
            made.zero_grad()
        return values(names_of(pipe))

    for at, until in zip(order, (2, STEPS), strict=True):
        place = [(2, "single"), (2, "v"), (4, "single"), (1, "v")][at]
        whole = merged(run(place, layers, partial(program, until=until)))
    require_equal(whole, alone(layers, groups, OPTIMIZERS["adamw"]))


def test_a_state_dict_needs_one_name_of_a_tied_parameter_and_must_not_have_two_values() -> None:
    layers = layers_of(1, [("embedding.weight", "block.3.1.weight"), ("embedding.weight", "head.weight")])
    state = {f"{layer}.{name}": x for layer, m in layers.items() for name, x in m.state_dict().items()}
    new = torch.full((WIDTH, WIDTH), 0.5)
    names = ("embedding.weight", "block.3.1.weight", "head.weight")
    for kept in names:
        reduced = {name: value for name, value in state.items() if name not in names} | {kept: new}

        def program(pipe: Pipeline, reduced: dict[str, Tensor] = reduced) -> dict[str, Tensor]:
            pipe.load_state_dict(reduced)
            pipe.evaluate(*batch(0))
            with pytest.raises(InvalidRun, match=r"different values for embedding\.weight and head\.weight"):
                pipe.load_state_dict(state | {"head.weight": new})
            return values(names_of(pipe))

        for placement in ("single", *["v"] * (kept == "head.weight")):
            found = merged(run((2, placement), layers, program))
            assert all(torch.equal(found[name], new) for name in names)


def test_a_buffer_that_layers_on_different_ranks_share_must_not_change() -> None:
    norm = nn.BatchNorm1d(3)
    layers = {"embedding": nn.Embedding(WIDTH, WIDTH), "a": norm, "b": nn.Linear(WIDTH, WIDTH), "c": norm}
    for frozen in (False, True):

        def program(pipe: Pipeline, frozen: bool = frozen) -> dict[str, Tensor]:
            made = torch.optim.SGD(pipe.parameters(), lr=0.1)
            for module in nn.ModuleList(pipe.modules.values()).modules() if frozen else ():
                if isinstance(module, nn.BatchNorm1d):
                    module.momentum = 0.0
            return train(pipe, made, 2)

        found = run((2, "single"), layers, program)
        if frozen:
            assert torch.equal(merged(found)["a.weight"], merged(found)["c.weight"])
        else:
            with pytest.raises(InvalidRun, match=r"share the buffer c\.running_mean"):
                merged(found)


class Stated(LayerList):
    """Layers from functions, which say what they share."""

    def tied_parameters(self) -> list[tuple[str, str]]:
        return [("block.0.weight", "block.5.weight")]


@pytest.mark.parametrize(("placement", "tensors"), [("v", 1), ("single", 2)])
def test_layers_with_dots_in_their_names_may_state_their_ties(placement: str, tensors: int) -> None:
    """On one rank the two names are one tensor."""

    def program(pipe: Pipeline) -> tuple[set[int], dict[str, Tensor]]:
        made = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for _ in range(2):
            pipe.step(torch.ones(ROWS, WIDTH), torch.zeros(ROWS, WIDTH))
            made.step()
        tied = {name: p for name, p in names_of(pipe) if name in ("block.0.weight", "block.5.weight")}
        return {id(parameter) for parameter in tied.values()}, values(tied.items())

    layers = {f"block.{at}": partial(nn.Linear, WIDTH, WIDTH) for at in range(6)}
    found = on_ranks(plan_of(2, placement), partial(Stated, layers, 1), nn.functional.mse_loss, program)
    assert len({identity for identities, _ in found for identity in identities}) == tensors
    first, second = merged([tied for _, tied in found]).values()
    assert torch.equal(first, second)


class Borrowing(nn.Module):
    """A head that uses the embedding's weight without having it."""

    def __init__(self, embedding: nn.Embedding):
        super().__init__()
        self.borrowed = [embedding]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.borrowed[0].weight)


def test_a_parameter_of_another_rank_must_not_be_used_in_secret() -> None:
    """On another rank than the embedding, the head's share of the gradient would be lost."""
    layers = layers_of(1)
    layers["head"] = Borrowing(layers["embedding"])  # type: ignore[arg-type]  # is one

    with pytest.raises(WorkerError, match=r"no layer of this rank has|uses embedding\.weight"):
        merged(run((2, "single"), layers, sgd))
    require_equal(merged(run((2, "v"), layers, sgd)), alone_with_sgd(layers))
