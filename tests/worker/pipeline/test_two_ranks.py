"""A user's program on two ranks of a V: results are those of one process; ranks are threads."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import zbv_worker as zbv
from support.functions import Adapted
from support.gradients import require_gradients, train_plainly
from support.small_pipeline import ROWS, WIDTH, batch, model
from support.thread_pipeline import on_ranks, plan_of, rank_of, returned
from torch import Tensor, nn
from torch.nn import functional as nnf
from zbv_worker import Pipeline

MICROBATCHES = 4


def run(
    program: Callable[[Pipeline], Any],
    layers: Callable[[], Any] = model,
    loss: Any = nnf.mse_loss,
    **options: Any,
) -> list[Any]:
    """What a program returns or raises on both ranks. The first and the last stage are on rank 0."""
    return on_ranks(plan_of(2, "v", MICROBATCHES), layers, loss, program, **options)


def test_gradients_losses_and_outputs_are_those_of_one_process() -> None:
    """Batches of two sizes, whose gradients add up, evaluations of a half, and a step that begins again."""
    steps: list[tuple[Any, ...]] = []
    for seed, rows in ((1, ROWS), (2, 2 * ROWS), (3, ROWS)):
        inputs, targets = batch(seed, rows)
        reference = model()
        earlier = [steps[0][:2]] if seed == 2 else []  # whose gradients add up
        train_plainly(reference, nnf.mse_loss, *earlier, (inputs, targets))
        half = inputs[: rows // 2], targets[: rows // 2]
        steps.append((inputs, targets, half, reference, reference(inputs).detach()))

    def program(pipe: Pipeline) -> list[str]:
        for seed, (inputs, targets, half, reference, expected) in enumerate(steps, 1):
            loss, outputs = pipe.step(inputs, targets, outputs=True)
            evaluated = pipe.evaluate(*half)
            require_gradients(pipe, reference)
            assert (loss is None) == (outputs is None) == (evaluated is None) == (rank_of(pipe) == 1)
            if loss is not None:
                torch.testing.assert_close(torch.cat(outputs), expected)
                torch.testing.assert_close(loss, nnf.mse_loss(expected, targets))
                torch.testing.assert_close(evaluated, nnf.mse_loss(expected[: len(half[0])], half[1]))
            if seed == 2:
                for parameter in pipe.parameters():
                    parameter.grad = None
        return [name for name, _ in pipe.named_parameters()]

    names = [name for rank in returned(run(program)) for name in rank]
    assert sorted(names) == sorted(name for name, _ in model().named_parameters())


def weighted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Squared errors of the rows whose first target is positive, and their number."""
    rows = target[:, 0] > 0
    return (output - target).square().mean(1)[rows].sum(), rows.sum()


class Begin(nn.Linear):
    """Passes on a tensor, the place of each row's largest number, and a constant."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x.argmax(1), None


class Between(Begin):
    """Takes all of that, and keywords that it uses with an auxiliary loss."""

    def forward(  # type: ignore[override]
        self, x: Tensor, place: Tensor, constant: None, *, scale: Tensor, weight: Tensor
    ) -> Any:
        assert constant is None
        assert not place.is_floating_point()
        y = nn.Linear.forward(self, x * scale).tanh() + place.unsqueeze(1)
        return zbv.add_auxiliary_loss(y, 0.1 * y.square().mean(), weight.sum()), place, None


class End(Begin):
    def forward(self, x: Tensor, *_: object) -> Any:
        return nn.Linear.forward(self, x)


def several() -> nn.ModuleList:
    torch.manual_seed(3)
    return nn.ModuleList(kind(WIDTH, WIDTH) for kind in (Begin, Between, Between, Between, End))


def several_batch() -> tuple[Tensor, Tensor, dict[str, Any]]:
    inputs, targets = batch()
    return inputs, targets, {"scale": batch(4)[0][:, :1], "weight": (targets[:, :1] > 0).float()}


def cut(sizes: int | list[int] = ROWS // MICROBATCHES) -> list[tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """The microbatches of several_batch, with so many rows each."""
    inputs, targets, keywords = several_batch()
    parts = zip(*(torch.split(each, sizes) for each in (inputs, targets, *keywords.values())), strict=True)
    return [(x, target, dict(zip(keywords, rest, strict=True))) for x, target, *rest in parts]


def several_trained(sizes: int | list[int] = ROWS // MICROBATCHES) -> Any:
    """The layers after a plain loop over the microbatches, with gradients."""
    total, weights = torch.zeros(()), torch.zeros(())
    reference: Any = several()
    for x, target, keywords in cut(sizes):
        y, place, _ = reference[0](x)
        for layer in list(reference)[1:-1]:
            y = nn.Linear.forward(layer, y * keywords["scale"]).tanh() + place.unsqueeze(1)
            total = total + 0.1 * y.square().mean() * keywords["weight"].sum()
        loss, counted = weighted(reference[-1](y), target)
        total, weights = total + loss, weights + counted
    torch.autograd.backward(total / weights)
    return reference


def test_values_keywords_and_auxiliary_losses_reach_every_stage() -> None:
    """The first step runs twice, because its auxiliary losses did not know that the loss has weights."""
    inputs, targets, keywords = several_batch()
    reference = several_trained()

    def program(pipe: Pipeline) -> set[str]:
        _, outputs = pipe.step(inputs, targets, outputs=True, **keywords)
        require_gradients(pipe, reference)
        assert (None if outputs is None else len(outputs)) == (None if rank_of(pipe) else MICROBATCHES)
        assert rank_of(pipe) == 0 or float(pipe.auxiliary_loss or 0.0) > 0
        boundaries = {str(boundary) for boundary in pipe.boundaries.values()}
        with pytest.raises(zbv.WorkerError, match="found the keyword 'mask', which no layer takes"):
            pipe.step(inputs, targets, mask=inputs)
        return boundaries

    first, second = returned(run(program, several, weighted))
    assert first == second
    assert all("int64" in boundary for boundary in first)


def test_microbatches_may_have_different_shapes() -> None:
    sizes = ([1, 3, 3, 1], [2, 1, 1, 4])
    references = [several_trained(some) for some in sizes]

    def program(pipe: Pipeline) -> None:
        for some, reference in zip(sizes, references, strict=True):
            for parameter in pipe.parameters():
                parameter.grad = None
            _, outputs = pipe.step(microbatches=cut(some), outputs=True)
            require_gradients(pipe, reference)
            assert outputs is None or [len(each) for each in outputs] == some
        largest = "([4, 4] float32 with gradient, [4] int64, None)"
        assert {str(boundary) for boundary in pipe.boundaries.values()} == {largest}

    returned(run(program, several, weighted))
    uneven = list(zip(*(torch.split(each, [1, 3, 2, 2]) for each in batch()), strict=True))
    found = run(lambda pipe: pipe.step(microbatches=uneven))
    assert [type(each) for each in found] == [zbv.ModelError, zbv.PeerLost]
    said = f"the loss returned means over microbatches with targets of {WIDTH} to {3 * WIDTH} numbers"
    assert all(said in str(each) for each in found)


@pytest.mark.parametrize("source", [0, 1])
def test_one_rank_has_the_data_of_all(source: int) -> None:
    """A batch on no rank, or one that cannot be divided, is refused on both, and the pipeline goes on."""
    inputs, targets, keywords = several_batch()
    reference = several_trained()
    none = f"found no batch; rank {source} is the pipeline's data rank"
    uneven = "inputs has 3 rows; must be a multiple"

    def program(pipe: Pipeline) -> list[Any]:
        has_data = rank_of(pipe) == source
        data: Sequence[Any] = (inputs, targets) if has_data else ()
        more = keywords if has_data else {}
        prefix = "" if has_data else f"rank {source}: .*"
        for wrong, message in ((), none), ((inputs[:3], targets[:3]) if has_data else (), uneven):
            with pytest.raises(zbv.InvalidRun, match=f"{prefix}{message}"):
                pipe.step(*wrong)
        loss, outputs = pipe.evaluate(*data, outputs=True, **more)
        first = pipe.step(*data, **more)
        require_gradients(pipe, reference)
        assert outputs is None or len(outputs) == MICROBATCHES
        # The parameters are the same, so this has the same loss; the microbatches are in another order.
        return [loss, first, pipe.step(microbatches=cut()[::-1]) if has_data else pipe.step()]

    first, second = returned(run(program, several, weighted, data_rank=source))
    assert second == [None] * 3
    torch.testing.assert_close(first[1:], [first[0]] * 2)


def test_data_on_another_rank_than_the_data_rank_are_refused() -> None:
    first, second = run(lambda pipe: pipe.step(*batch()), data_rank=0)
    assert str(second).startswith("found a batch on rank 1; the pipeline's data rank is 0")
    assert "rank 1 lost: found a batch on rank 1" in str(first)


class Scaled(nn.Linear):
    """A layer with an optional keyword."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x * scale)


def test_a_rank_that_lacks_a_keyword_is_named() -> None:
    def program(pipe: Pipeline) -> None:
        given: dict[str, Any] = {} if rank_of(pipe) else {"scale": 2.0}
        pipe.step(*batch(), **given)

    for said in map(str, run(program, lambda: [Scaled(WIDTH, WIDTH) for _ in range(4)])):
        assert "rank 1 was not given the keyword 'scale', which its layers take and rank 0" in said


def test_optimizers_schedules_and_clipping_train_the_same_model() -> None:
    """Parameter groups by name and a fused optimizer. Rank 0 gathers the state; every rank loads its part."""

    def prepared(named: Any) -> tuple[torch.optim.Optimizer, Any]:
        parts: dict[bool, list[Any]] = {True: [], False: []}
        for name, parameter in named:
            parts[name.endswith("bias")].append((name, parameter))
        groups = [{"params": parts[True], "weight_decay": 0.0}, {"params": parts[False], "weight_decay": 0.1}]
        made = torch.optim.AdamW(groups, lr=0.1, fused=True)
        return made, torch.optim.lr_scheduler.LinearLR(made, total_iters=3)

    def train(named: Any, step: Callable[..., Any], clip: Callable[[], Tensor]) -> list[Tensor]:
        norms, (made, schedule) = [], prepared(named)
        for seed in (1, 2, 3):
            step(*batch(seed))
            norms.append(clip())
            made.step()
            made.zero_grad()
            schedule.step()
        return norms

    reference = model()
    norms = train(
        reference.named_parameters(),
        lambda *one: train_plainly(reference, nnf.mse_loss, one),
        lambda: nn.utils.clip_grad_norm_(reference.parameters(), 0.05),
    )
    expected, fresh = reference.state_dict(), model().state_dict()

    def program(pipe: Pipeline) -> Any:
        found = train(pipe.named_parameters(), pipe.step, lambda: pipe.clip_grad_norm_(0.05))
        torch.testing.assert_close(found, norms)
        own, whole = pipe.state_dict(), pipe.full_state_dict()
        torch.testing.assert_close(own, {name: expected[name] for name in own}, rtol=1e-4, atol=1e-5)
        assert (whole is None) == (rank_of(pipe) == 1)
        if whole is not None:
            torch.testing.assert_close(dict(sorted(whole.items())), dict(sorted(expected.items())))
        pipe.load_state_dict(fresh)
        torch.testing.assert_close(pipe.state_dict(), {name: fresh[name] for name in own}, rtol=0, atol=0)

    returned(run(program))


def test_a_trace_has_every_action_of_all_ranks(tmp_path: Path) -> None:
    def program(pipe: Pipeline) -> list[list[str]]:
        pipe.step(*batch())
        return [[str(action) for action in trace.actions] for trace in pipe.trace(tmp_path / "trace.json")]

    lists = plan_of(2, "v", MICROBATCHES).orders.all_text()
    assert returned(run(program)) == [lists] * 2
    written = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    named = {event["name"] for event in written if event["ph"] == "X"}
    assert named.issuperset(action for rank in lists for action in rank)


def test_only_the_layers_of_the_rank_are_built() -> None:
    built: list[str] = []

    def build(name: str) -> nn.Module:
        built.append(name)
        return nn.Linear(WIDTH, WIDTH)

    def program(pipe: Pipeline) -> list[str]:
        return sorted({name.partition(".")[0] for name in pipe.state_dict()})

    found = returned(run(program, lambda: {name: partial(build, name) for name in "abcd"}))
    assert found == [["a", "d"], ["b", "c"]]
    assert sorted(built) == list("abcd")


def with_frozen(*places: int) -> nn.Sequential:
    layers = model()
    for place in places:
        layers[place].requires_grad_(False)
    return layers


def with_adapters() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Adapted(layer, 2) for layer in model() if isinstance(layer, nn.Linear)))


FROZEN = [partial(with_frozen, *places) for places in ((0,), (0, 1), (0, 1, 2), (1,), (2, 3))]


@pytest.mark.parametrize("layers", [*FROZEN, with_adapters])
def test_frozen_layers_and_adapters_train_as_in_one_process(layers: Callable[[], nn.Sequential]) -> None:
    inputs, targets = batch()
    reference = layers()
    loss = train_plainly(reference, nnf.mse_loss, *[(inputs, targets)] * 2)

    def program(pipe: Pipeline) -> list[Any]:
        found = [pipe.step(inputs, targets) for _ in range(2)]
        require_gradients(pipe, reference)
        return found

    found = returned(run(program, layers))
    torch.testing.assert_close([*map(torch.as_tensor, found[0])], [loss] * 2)


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_a_stage_above_frozen_ones_computes_no_gradient_of_its_input(*, is_recomputed: bool) -> None:
    """Until a layer below is trained again, on another rank; or the batch needs a gradient."""
    inputs, targets = batch()
    whole = model()
    train_plainly(whole, nnf.mse_loss, (inputs, targets))
    seen: dict[int, list[bool]] = {}

    def program(pipe: Pipeline) -> None:
        for index, stage in pipe._own.trained.stages.items():
            stage.is_recomputed = is_recomputed
            (layer,) = stage.module.children()
            own = seen.setdefault(index, [])
            layer.register_forward_hook(lambda _, given, output, own=own: own.append(output.requires_grad))
        frozen = [p for name, p in pipe.named_parameters() if name[0] in "01"]
        for parameter in frozen:
            parameter.requires_grad_(False)
        pipe.step(inputs, targets)
        for parameter in frozen:
            parameter.requires_grad_(True)
        for parameter in pipe.parameters():
            parameter.grad = None
        pipe.step(inputs, targets)
        require_gradients(pipe, whole)

    returned(run(program))
    for index, first in enumerate((False, False, True, True)):
        # A recomputed F has no graph, and is repeated with one if there is a backward.
        without = [False] * MICROBATCHES if is_recomputed or not first else []
        of_first = [*without, *[True] * MICROBATCHES * first]
        of_second = [*[False] * MICROBATCHES * is_recomputed, *[True] * MICROBATCHES]
        assert sorted(seen[index]) == sorted([*of_first, *of_second]), index


def test_a_batch_that_needs_a_gradient_gets_it_through_frozen_stages() -> None:
    inputs, targets = batch()
    whole, leaf = with_frozen(0, 1), inputs.clone().requires_grad_()
    train_plainly(whole, nnf.mse_loss, (leaf, targets))

    def program(pipe: Pipeline) -> Tensor | None:
        own = inputs.clone().requires_grad_()
        for given in (inputs, own):
            pipe.step(given if 0 in pipe.modules else None, targets)
        return own.grad

    torch.testing.assert_close(returned(run(program, partial(with_frozen, 0, 1)))[0], leaf.grad)
