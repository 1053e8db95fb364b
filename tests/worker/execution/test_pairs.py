"""Pairs on one rank: what a second thread gets, who may run what, and plans that cannot be pairs."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zbv_worker as zbv
from support.functions import Function
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.reading import parse_problem
from zbv_worker.errors import InvalidRun, ModelError
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.execution.turns import Half, collective_started

ACTIONS = ["0F0", "0F1+0I0", "0W0", "0F2+0B1", "0F3+0I2", "0W2", "0B3"]
DOCUMENT: dict[str, Any] = {
    "pp_degree": 1,
    "microbatches": 4,
    "placement": "single",
    "costs": {
        **{"forward": 2, "backward_input": 2, "backward_weight": 1},
        "communication": {"forward": 1, "backward_input": 1, "backward": 1},
    },
}
PLAN = {"problem": DOCUMENT, "ranks": [ACTIONS]}
VARIABLE = contextvars.ContextVar("VARIABLE", default="not set")


class Observed(torch.autograd.Function):
    """Calls a function in the forward and in the backward, where a collective would be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, see: Callable[[str], None]) -> Tensor:
        ctx.see = see
        see("F")
        collective_started()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.see("B")
        collective_started()
        return gradients[0], None


def layers_of(compute: Callable[[Any, Tensor], Any]) -> list[nn.Module]:
    return [Function(compute, linear=nn.Linear(4, 4)) for _ in range(2)]


def unseen(where: str) -> None:
    pass


def stepped(see: Callable[[str], None] = unseen, steps: int = 2, overlap: Any = None) -> dict[str, Tensor]:
    """The gradients of the last step."""
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    layers = layers_of(lambda self, x: Observed.apply(self.linear(x), see))  # type: ignore[no-untyped-call]
    with zbv.Pipeline(PLAN, layers, nn.functional.mse_loss, overlap=overlap) as pipe:
        for _ in range(steps):
            for parameter in pipe.parameters():
                parameter.grad = None
            pipe.step(x, x.flip(1))
        return {n: p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}


def states() -> dict[str, object]:
    """What torch and Python keep for the calling thread."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return {
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "hooks of saved tensors": hooks is not None,
        "modes of dispatch": len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()),
        "context variables": VARIABLE.get(),
        "threads of autograd": torch._C._is_multithreading_enabled(),
        "replays views": torch._C._is_view_replay_enabled(),
    }


def test_the_second_thread_has_the_state_of_the_first() -> None:
    seen: dict[str, list[dict[str, object]]] = {"MainThread": [], "zbv-pair": []}

    def see(where: str) -> None:
        # In a backward, autograd itself switches the grad mode off.
        found = {**states(), "grad mode": where}
        seen[threading.current_thread().name].append(found)

    VARIABLE.set("set")
    torch.set_default_device("cpu")
    try:
        with (
            torch.autocast("cpu", torch.bfloat16),
            saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
            FlopCounterMode(display=False),
            torch.autograd.set_multithreading_enabled(False),
        ):
            wanted = states()
            stepped(see)
    finally:
        torch.set_default_device(None)
    assert seen["zbv-pair"]
    for found in seen["zbv-pair"]:
        assert found == {**wanted, "grad mode": "B"}


def test_offloaded_activations_reach_the_second_thread() -> None:
    plain = stepped()
    with save_on_cpu():
        offloaded = stepped()
    torch.testing.assert_close(offloaded, plain, rtol=0, atol=0)


def test_halves_without_collectives_need_no_thread() -> None:
    names = set()
    x = torch.randn(8, 4)
    layer = nn.Linear(4, 4)
    layer.register_full_backward_pre_hook(lambda *_: names.add(threading.current_thread().name))
    with zbv.Pipeline(PLAN, [nn.Linear(4, 4), layer], nn.functional.mse_loss) as pipe:
        for _ in range(3):
            pipe.step(x, x)
    assert names == {"MainThread"}


def test_turns_alternate_at_collectives_and_the_backward_is_first() -> None:
    order: list[str] = []
    stepped(order.append)
    # Of the last pair, 0F3+0I2: two layers, so two collectives in each half; then 0B3.
    assert order[-6:] == ["B", "F", "B", "F", "B", "B"]


def test_a_users_function_gets_both_halves_of_every_pair() -> None:
    calls = []

    def overlap(forward: Half, backward: Half) -> None:
        calls.append(f"{forward.action}+{backward.action}")
        assert isinstance(forward.module, nn.Module)
        zbv.in_turns(forward, backward)

    found = stepped(steps=1, overlap=overlap)
    assert calls == [entry for entry in ACTIONS if "+" in entry]
    torch.testing.assert_close(found, stepped(steps=1), rtol=0, atol=0)


@pytest.mark.parametrize(("letter", "action"), [("F", "0F3"), ("B", "0I2")])
def test_an_error_in_one_half_ends_the_step_and_the_other_half(letter: str, action: str) -> None:
    pairs = 0

    def fail(where: str) -> None:
        nonlocal pairs
        in_second = threading.current_thread().name == "zbv-pair"
        pairs += in_second
        if pairs and in_second == (letter == "B"):
            raise ArithmeticError("no luck")

    # The third pair of the first step is the first one with actions that are known to have collectives.
    with pytest.raises(ArithmeticError, match="no luck") as found:
        stepped(fail)
    assert any(f"step 0, action {action}" in note for note in found.value.__notes__)
    assert not [thread for thread in threading.enumerate() if thread.name == "zbv-pair"]


@pytest.mark.parametrize(
    ("overlap", "message"),
    [
        (lambda forward, backward: forward(), "did not run 0I0"),
        (lambda forward, backward: (forward(), forward()), "0F1 was run twice"),
    ],
)
def test_a_users_function_must_call_each_half_once(overlap: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        stepped(overlap=overlap)


def test_what_is_no_function_is_refused_before_the_first_step() -> None:
    with pytest.raises(InvalidRun, match="found a str as overlap"):
        stepped(overlap="in turns")


def test_a_rank_refuses_a_pair_that_is_none() -> None:
    problem: Any = parse_problem(DOCUMENT)
    plan = RankPlan.of("plan", problem, Orders.from_text([ACTIONS]), 0)
    assert [str(plan.actions[place]) for place in plan.pairs] == ["0F1", "0F2", "0F3"]
    with pytest.raises(InvalidRun, match="0F0 is paired with 0F1"):
        RankPlan(**{**vars(plan), "pairs": (0,)})


def test_marked_communication_hands_over() -> None:
    order: list[str] = []

    def marked(self: Any, x: Tensor) -> Tensor:
        order.append(threading.current_thread().name)
        x = zbv.hand_over(self.linear(x))
        x.register_hook(lambda gradient: order.append(threading.current_thread().name))  # type: ignore[no-untyped-call]
        return x

    x = torch.randn(8, 4)
    with zbv.Pipeline(PLAN, layers_of(marked), nn.functional.mse_loss) as pipe:
        pipe.step(x, x)
        order.clear()
        pipe.step(x, x)
    assert "zbv-pair" in order


def test_a_stages_random_numbers_do_not_depend_on_turns() -> None:
    """A backward that winds the generator back, as checkpointing does, while F draws."""

    def draws(see: list[float]) -> Callable[[str], None]:
        def draw(where: str) -> None:
            if where == "F":
                see.append(float(torch.rand(())))
            else:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(1)
                    collective_started()

        return draw

    turns: list[float] = []
    alone: list[float] = []
    stepped(draws(turns))
    stepped(draws(alone), overlap=lambda forward, backward: (forward(), backward()))
    assert turns == alone


def test_a_backward_draws_other_numbers_than_the_f_of_its_pair() -> None:
    drawn: dict[str, list[float]] = {"F": [], "B": []}
    stepped(lambda where: drawn[where].append(float(torch.rand(()))))
    assert not set(drawn["F"]) & set(drawn["B"])
