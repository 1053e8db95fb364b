"""Copies to the host: values come back as they were, and memory is free in between, but nobody else's."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
import zbv_worker as zbv
from support.functions import Function
from support.stages import backward
from torch import Tensor, nn
from zbv_solver.plans.orders import Action, Orders
from zbv_solver.problem.reading import parse_problem
from zbv_worker.errors import InvalidRun, ModelError
from zbv_worker.execution.copies import Copies
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.execution.timeline import HostTimeline
from zbv_worker.measure.live_bytes import LiveBytes
from zbv_worker.stage.stage import Stage

CPU = torch.device("cpu")
ROWS, WIDTH = 64, 32
MASK = torch.rand(ROWS, ROWS) < 0.5
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*deprecated:DeprecationWarning")  # torch's own


class Masked(nn.Module):
    """Attention with a mask that all microbatches share, dropout, a norm and a complex product."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.twice = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        key = self.project(self.norm(x)).float()
        weights = (key @ self.twice(x).t()).masked_fill(MASK, -1.0).softmax(-1)
        turned = torch.complex(key, x)
        mixed = (turned.conj() * turned * torch.complex(x, key)).imag
        return x + nnf.dropout(weights @ self.twice(key), 0.3) + 0.1 * mixed.tanh()


STAGES: dict[str, Callable[..., Stage]] = {
    "plain": lambda *layers: stage_of(*layers),
    "recomputed": lambda *layers: stage_of(*layers, is_recomputed=True, layers=layers),
    "cast": lambda *layers: stage_of(*layers, autocast=torch.bfloat16),
    "writing to its input": lambda *layers: stage_of(Function(lambda _, x: nnf.relu_(x).mul(x)), *layers),
    "compiled": lambda *layers: stage_of(*layers, layers=layers, is_compiled=True),
}


def stage_of(*modules: nn.Module, **options: Any) -> Stage:
    return Stage(1, 3, nn.Sequential(*modules), 1, **options)


def copies_of(stage: Stage) -> Copies:
    return Copies({1: stage}, CPU, HostTimeline())


def kept(copies: Copies, stage: Stage, x: Tensor, microbatch: int = 0, *, split: bool = False) -> Any:
    """An F whose memory is copied later."""
    return copies.keeping(1, microbatch, lambda: stage.forward(microbatch, x, split=split))()


def copied(copies: Copies, letters: str = "ODRI", microbatch: int = 0) -> None:
    """To the host, and back."""
    for letter in letters:
        copies.run(Action(1, letter, microbatch))


def trained(stage: Stage, letters: str, copies: Copies | None, steps: int = 2) -> list[Tensor]:
    """The gradients of parameters and inputs, of steps with one microbatch each."""
    found, split = [], letters == "IW"
    for step in range(steps):
        torch.manual_seed(step)
        x, gradient = torch.randn(2, ROWS, WIDTH)
        if copies is None:
            stage.forward(0, x, split=split)
        else:
            copies.begin()
            kept(copies, stage, x, split=split)
            copied(copies)
        found.append(backward(stage, gradient, split=split))
    return [*found, *(p.grad for p in stage.module.parameters() if p.grad is not None)]


@pytest.mark.usefixtures("compiled_without_code")
@pytest.mark.parametrize("letters", ["IW", "B"])
@pytest.mark.parametrize("kind", STAGES)
def test_what_comes_back_has_the_gradients_of_what_stays(kind: str, letters: str) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [Masked(), Masked()]
    plain, moved = (STAGES[kind](*copy.deepcopy(layers)) for _ in range(2))
    copies, mask = copies_of(moved), MASK.clone()
    expected = trained(plain, letters, None)
    for a, b in zip(trained(moved, letters, copies), expected, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(MASK, mask)
    copies.close()
    if kind == "compiled":
        # The first microbatch ran uncompiled.
        later = copies_of(moved)
        trained(moved, letters, later, 1)
        later.close()
        assert later.host_bytes > 0.9 * copies.host_bytes


@pytest.mark.parametrize("kind", [kind for kind in STAGES if kind != "compiled"])
def test_the_device_holds_next_to_nothing_between_the_copies(kind: str) -> None:
    """Except what others hold: the memory of the shared mask, of buffers and of parameters."""
    stage = STAGES[kind](Masked(), Masked())
    trained(stage, "IW", None, 1)
    copies = copies_of(stage)
    with LiveBytes() as live:
        copies.begin()
        kept(copies, stage, torch.randn(ROWS, WIDTH))
        held = live.bytes
        copied(copies, "OD")
        between = live.bytes - copies.host_bytes
        copied(copies, "RI")
        again = live.bytes - copies.host_bytes
        stage.backward(0, torch.randn(ROWS, WIDTH))
        after = live.bytes - copies.host_bytes
    copies.close()
    assert copies.host_bytes <= 1.05 * held + MASK.nbytes
    assert held >= (2 if kind == "recomputed" else 10) * ROWS * WIDTH * 4
    assert between <= 0.02 * held + MASK.nbytes
    assert again == pytest.approx(held, abs=0.02 * held + 2 * MASK.nbytes)
    assert after <= 0.02 * held + 100


def test_who_keeps_a_tensor_of_a_layer_keeps_its_values() -> None:
    """The other stage of a rank, for instance, or a layer for its next microbatch."""
    seen: list[Tensor] = []

    def stash(_: Any, x: Tensor) -> Tensor:
        seen.append(x.tanh())
        return seen[-1] * seen[-1]

    stage = stage_of(Function(stash))
    copies, x = copies_of(stage), torch.randn(ROWS, WIDTH)
    output = kept(copies, stage, x)
    for letter in "ODRI":
        copied(copies, letter)
        assert torch.equal(seen[0], x.tanh())
        assert torch.equal(output, x.tanh() * x.tanh())
    copies.close()


def there_and_back(stage: Stage, x: Tensor) -> Copies:
    """An F whose copies have ended."""
    copies = copies_of(stage)
    kept(copies, stage, x)
    copied(copies)
    copies.close()
    return copies


@pytest.mark.parametrize("kind", ["plain", "recomputed"])
def test_a_layer_that_keeps_its_input_finds_it_unchanged(kind: str) -> None:
    seen: list[Tensor] = []

    def keep(_: Any, x: Tensor) -> Tensor:
        seen.append(x)
        return x * x

    stage, x = STAGES[kind](Function(keep)), torch.randn(ROWS, WIDTH)
    copies = copies_of(stage)
    kept(copies, stage, x)
    for letter in "ODRI":
        copied(copies, letter)
        assert torch.equal(seen[0], x)
    copies.close()


def test_a_write_to_a_buffer_that_a_layer_has_saved_is_an_error_as_without_copies() -> None:
    scale = torch.rand(WIDTH)
    stage = stage_of(Function(lambda _, x: x * scale, scale=nn.Buffer(scale)))
    there_and_back(stage, torch.randn(ROWS, WIDTH))
    scale.mul_(0.5)
    with pytest.raises(ModelError, match="written to"):
        stage.backward(0, torch.ones(ROWS, WIDTH))


def test_graphs_that_end_within_f_may_be_written_to_and_do_not_move() -> None:
    def tuned(_: Any, x: Tensor) -> Tensor:
        inner = torch.zeros(ROWS, WIDTH, requires_grad=True)
        loss = ((x.detach() + inner).exp() * inner.exp()).sum()
        (gradient,) = torch.autograd.grad(loss, inner)
        unused = x.exp()
        unused.add_(1)
        return x * 2.0 - gradient

    stage = stage_of(Function(tuned))
    copies = there_and_back(stage, torch.randn(ROWS, WIDTH))
    assert copies.host_bytes <= ROWS * WIDTH * 4  # the input
    assert torch.equal(stage.backward(0, torch.ones(ROWS, WIDTH)), torch.full((ROWS, WIDTH), 2.0))


def test_a_backward_frees_what_it_no_longer_needs() -> None:
    """Layer after layer, as without copies."""
    plain, copied = freed_by_layers(is_copied=False), freed_by_layers(is_copied=True)
    assert min(plain) > 2 * ROWS * WIDTH * 4
    assert copied == plain


def freed_by_layers(*, is_copied: bool) -> list[int]:
    """The bytes that the backward of each layer but the first frees."""
    seen: list[int] = []

    def note(_: Any, x: Tensor) -> Tensor:
        x.register_hook(lambda gradient: seen.append(live.bytes))  # type: ignore[no-untyped-call]
        return x.tanh().exp().tanh()

    with LiveBytes() as live:
        stage = stage_of(*(Function(note) for _ in range(4)))
        x = torch.randn(ROWS, WIDTH)
        if is_copied:
            there_and_back(stage, x)
        else:
            stage.forward(0, x, split=False)
        stage.backward(0, torch.ones(ROWS, WIDTH))
    return [before - after for before, after in pairwise(seen)]


def test_data_stay_where_they_are() -> None:
    """A microbatch is a view of its batch, all of which would move."""
    batch, targets = torch.randn(8, ROWS, WIDTH), torch.randn(8, ROWS, WIDTH)
    weight = nn.Parameter(torch.rand(WIDTH))
    stage = Stage(0, 1, Function(lambda _, x: x * weight), 1, nnf.mse_loss)
    stage.forward(1, batch[0], targets[0], split=False)  # the first F has a copy, to which layers may write
    copies = Copies({0: stage}, CPU, HostTimeline())
    copies.keeping(0, 0, partial(stage.forward, 0, split=False))(batch[3], targets[3])
    copies.run(Action(0, "O", 0))
    copies.close()
    assert copies.host_bytes == ROWS * WIDTH * 4  # the output, which the loss has saved


def test_transforms_of_torch_func_are_refused_by_name() -> None:
    scored = Function(lambda _, x: x + torch.func.grad(lambda y: y.square().sum())(x))
    with pytest.raises(ModelError, match=r"torch\.func.*Use torch\.autograd\.grad"):
        there_and_back(stage_of(scored), torch.randn(ROWS, WIDTH))


def saving_stage() -> tuple[Stage, Copies, Tensor]:
    """A stage after an F, and what its layer has saved."""
    seen: list[Tensor] = []

    def save(_: Any, x: Tensor) -> Tensor:
        seen.append(x.tanh())
        return seen[-1] * 2.0

    stage = stage_of(Function(save))
    copies = copies_of(stage)
    kept(copies, stage, torch.randn(ROWS, WIDTH))
    return stage, copies, seen[0].detach()


def test_memory_that_somebody_frees_is_not_copied() -> None:
    _, copies, saved = saving_stage()
    saved.untyped_storage().resize_(0)
    with pytest.raises(ModelError, match="0 bytes of 8192"):
        copied(copies, "O")
    copies.close()


@pytest.mark.parametrize("when", ["F", "R"])
def test_a_write_to_what_a_layer_has_saved_is_an_error_as_without_copies(when: str) -> None:
    stage, copies, saved = saving_stage()
    if when == "F":
        saved.zero_()
    copied(copies)
    if when == "F":
        with pytest.raises(ModelError, match="written to"):
            stage.backward(0, torch.ones(ROWS, WIDTH))
    else:
        saved.zero_()  # what autograd has is a copy by now
        assert stage.backward(0, torch.ones(ROWS, WIDTH)).abs().sum() > 0
    copies.close()


def test_the_host_has_as_many_buffers_as_copies_at_once() -> None:
    stage = stage_of(Masked())
    copies, sizes = copies_of(stage), []
    for microbatches in ([0], [1, 2], [3], [4, 5, 6], [7, 8]):
        for j in microbatches:
            kept(copies, stage, torch.randn(ROWS, WIDTH), j)
            copied(copies, "O", j)
        for j in microbatches:
            copied(copies, "DRB", j)
            stage.backward(j, torch.ones(ROWS, WIDTH))
        sizes.append(copies.host_bytes)
    copies.close()
    # All microbatches share the mask, which moves once only.
    assert sizes[1] - sizes[0] == sizes[0] - MASK.nbytes
    assert [round(size / sizes[0]) for size in sizes] == [1, 2, 2, 3, 3]


DOCUMENT: dict[str, Any] = {
    "pp_degree": 1,
    "microbatches": 2,
    "placement": "single",
    "costs": {"forward": 2, "backward_input": 2, "backward_weight": 1, "offload": 1},
    "memory": {"forward": 2, "backward_input": -1, "backward_weight": -1},
}
ACTIONS = ["0F0", "0O0", "0F1", "0D0", "0I1", "0R0", "0W1", "0B0"]


def copying_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("zbv-copies")}


def test_a_pipeline_runs_copies_step_after_step() -> None:
    seen: set[str] = set()

    def see(_: Any, x: Tensor) -> Tensor:
        x.register_hook(lambda gradient: seen.update(copying_threads()))  # type: ignore[no-untyped-call]
        return x * x

    def stepped(actions: list[str]) -> list[Tensor]:
        torch.manual_seed(0)
        x = torch.randn(8, 4)
        plan = {"problem": DOCUMENT, "ranks": [actions]}
        with zbv.Pipeline(plan, [nn.Linear(4, 4), Function(see), nn.Linear(4, 4)], nnf.mse_loss) as pipe:
            losses = [pipe.step(x, x.flip(1)) for _ in range(3)]
            return [*losses, *(p.grad for p in pipe.parameters() if p.grad is not None)]

    copied, plain = stepped(ACTIONS), stepped([text for text in ACTIONS if text[1] not in "ODR"])
    assert all(torch.equal(a, b) for a, b in zip(copied, plain, strict=True))
    assert seen
    assert not copying_threads()


@pytest.mark.parametrize(
    "actions",
    [
        ["0O0", *ACTIONS[:1], *ACTIONS[2:]],
        [text for text in ACTIONS if text != "0R0"],
        ["0F0", "0D0", "0O0", *ACTIONS[4:]],
        ["0F0", "0O0", "0F1", "0D0", "0I1", "0W1", "0B0", "0R0", "0F0"],
    ],
)
def test_a_rank_refuses_copies_out_of_place(actions: list[str]) -> None:
    problem, orders = parse_problem(DOCUMENT), Orders.from_text([actions])
    with pytest.raises(InvalidRun, match="Check the plan with"):
        RankPlan.of("plan", problem, orders, 0)


def test_what_only_sleeps_has_nothing_to_copy() -> None:
    class Sleeping:
        def forward(self, microbatch: int, input: Any, target: Any = None, *, split: bool) -> Any: ...
        def backward(self, microbatch: int, grad_output: Any) -> Any: ...
        def backward_input(self, microbatch: int, grad_output: Any) -> Any: ...
        def backward_weight(self, microbatch: int) -> None: ...

    with pytest.raises(InvalidRun, match="has no model"):
        Copies({0: Sleeping()}, CPU, HostTimeline())
