"""What can be saved can be resumed: other ranks and placements go on as one process that never stopped."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_pipeline import WIDTH, batch
from support.thread_pipeline import on_ranks, plan_of, returned
from torch import Tensor, nn
from torch.optim import lr_scheduler
from zbv_worker.checkpoints import checkpoint_state
from zbv_worker.checkpoints.checkpoint import newest_checkpoint
from zbv_worker.errors import InvalidRun, WorkerError
from zbv_worker.pipeline.pipeline import Pipeline

Named = Iterable[tuple[str, nn.Parameter]]


class Block(nn.Module):
    """A layer with a parameter that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.used(x).tanh()
        return y


def blocks(frozen: Iterable[int] = ()) -> list[nn.Module]:
    torch.manual_seed(3)
    made: list[nn.Module] = [Block() for _ in range(4)]
    for at in frozen:
        made[at].requires_grad_(False)
    return made


class Counting(torch.optim.SGD):
    """An optimizer with a state of no parameter, nested tensors, and an own entry in its state_dict."""

    def __init__(self, params: Any, lr: float):
        super().__init__(params, lr)
        self.scale = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # without a closure
        steps = self.state["steps"]  # type: ignore[index]  # torch's own optimizers have only parameters
        steps["taken"] = steps.get("taken", 0) + 1
        self.scale *= 0.8
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state.setdefault("kind", "sum")
                    (total,) = state.setdefault("sums", [torch.zeros_like(parameter, dtype=torch.float64)])
                    total.add_(parameter.grad)
                    parameter.sub_(group["lr"] * self.scale / steps["taken"] * total)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "scale": self.scale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scale = state_dict["scale"]
        super().load_state_dict(state_dict)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=0.1),
    "amsgrad": partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "rprop": partial(torch.optim.Rprop, lr=0.1),
    "asgd": partial(torch.optim.ASGD, lr=0.1),
    "adafactor": partial(torch.optim.Adafactor, lr=0.1),
    "counting": partial(Counting, lr=0.1),
}
GROUPS: dict[str, Callable[[str], float]] = {
    "one": lambda name: 0.1,
    "layers": lambda name: 0.1 / (1 + int(name[0])),
    "halves": lambda name: 0.1 if int(name[0]) < 2 else 0.01,
    "kinds": lambda name: 0.1 if name.endswith("bias") else 0.05,
}


def lambdas(made: torch.optim.Optimizer) -> Any:
    return lr_scheduler.LambdaLR(made, lambda step: 0.9**step)


def cycle(made: torch.optim.Optimizer) -> Any:
    rates = [group["lr"] for group in made.param_groups]
    return lr_scheduler.OneCycleLR(made, rates, total_steps=10, cycle_momentum=False)


def several(made: torch.optim.Optimizer) -> Any:
    parts: list[Any] = [lr_scheduler.LinearLR(made, 0.5), lr_scheduler.LambdaLR(made, lambda step: 0.5**step)]
    return lr_scheduler.SequentialLR(made, parts, milestones=[1])


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambdas,
    "cycle": cycle,
    "several": several,
    "steps": lambda made: lr_scheduler.MultiStepLR(made, [1, 3], gamma=0.5),
    "cosine": lambda made: lr_scheduler.CosineAnnealingWarmRestarts(made, 3),
    "chained": lambda made: lr_scheduler.ChainedScheduler([lambdas(made), cycle(made)]),
}


def trained(named: Named, kind: str, groups: str, schedule: str) -> tuple[torch.optim.Optimizer, Any]:
    """An optimizer of the trainable parameters, in groups of equal learning rates."""
    found: dict[float, list[nn.Parameter]] = {}
    for name, parameter in named:
        if parameter.requires_grad:
            rate = GROUPS[groups](name) if name[0].isdigit() else 0.1
            found.setdefault(rate, []).append(parameter)
    made = OPTIMIZERS[kind]([{"params": some, "lr": rate} for rate, some in found.items()])
    return made, SCHEDULES[schedule](made)


def seen(named: Named, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """By parameter: its values, its learning rate, and its state."""
    rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    return {
        name: (parameter.detach().clone(), rates.get(parameter), dict(optimizer.state.get(parameter, {})))
        for name, parameter in named
        if name[0].isdigit()
    }


def alone(kind: str, groups: str, schedule: str, frozen: Iterable[int]) -> dict[str, Any]:
    """Four steps of one process."""
    model = nn.Sequential(*blocks(frozen))
    optimizer, rates = trained(model.named_parameters(), kind, groups, schedule)
    for step in range(4):
        inputs, targets = batch(step)
        nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
    return seen(model.named_parameters(), optimizer)


def saved_and_resumed(
    folder: Path, kind: str, groups: str, schedule: str, frozen: Iterable[int], places: list[tuple[int, str]]
) -> dict[str, Any]:
    """Two steps on the first ranks, two on the second ones."""

    def program(last: int, pipe: Pipeline) -> dict[str, Any]:
        optimizer, rates = trained(pipe.named_parameters(), kind, groups, schedule)
        checkpoints = pipe.checkpoints(folder, optimizer, rates)
        for step in checkpoints.steps(last, every=2):
            pipe.step(*batch(step))
            optimizer.step()
            rates.step()
            optimizer.zero_grad()
        return seen(pipe.named_parameters(), optimizer)

    whole: dict[str, Any] = {}
    for last, (ranks, placement) in zip((2, 4), places, strict=True):
        plan, mse = plan_of(ranks, placement), nn.functional.mse_loss
        found = returned(on_ranks(plan, lambda: blocks(frozen), mse, partial(program, last)))
        whole = {name: value for rank in found for name, value in rank.items()}
    return whole


PLACES = [(1, "single"), (2, "single"), (2, "v"), (4, "single")]
FROZEN: list[tuple[int, ...]] = [(), (), (0,), (0, 1), (1, 2), (0, 3)]


@pytest.mark.parametrize("seed", range(len(OPTIMIZERS)))
def test_other_ranks_go_on_as_one_process(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    kind, schedule = list(OPTIMIZERS)[seed], list(SCHEDULES)[seed % len(SCHEDULES)]
    groups, frozen = draw.choice(list(GROUPS)), draw.choice(FROZEN)
    places = [draw.choice(PLACES), draw.choice(PLACES)]
    expected = alone(kind, groups, schedule, frozen)
    found = saved_and_resumed(tmp_path, kind, groups, schedule, frozen, places)
    assert found.keys() == expected.keys()
    for name, (values, rate, state) in expected.items():
        mine, my_rate, my_state = found[name]
        torch.testing.assert_close(mine, values, rtol=1e-4, atol=1e-5, msg=name)
        assert my_rate == pytest.approx(rate), name
        assert my_state.keys() == state.keys(), name
        for key, value in state.items():
            if isinstance(value, str):
                assert my_state[key] == value
            else:
                torch.testing.assert_close(my_state[key], value, rtol=1e-3, atol=1e-5, msg=f"{name} {key}")


def resumed_with(folder: Path, first: Callable[..., Any], second: Callable[..., Any]) -> list[Any]:
    """A checkpoint of two ranks with one optimizer, resumed by one rank with another."""

    def program(make: Callable[..., Any], last: int, pipe: Pipeline) -> Any:
        optimizer = make(pipe)
        checkpoints = pipe.checkpoints(folder, optimizer)
        for step in checkpoints.steps(last, every=1):
            pipe.step(*batch(step))
            optimizer.step()
            optimizer.zero_grad()
        return {group["lr"] for group in optimizer.param_groups}

    mse = nn.functional.mse_loss
    on_ranks(plan_of(2, "single"), blocks, mse, partial(program, first, 1))
    return on_ranks(plan_of(1, "single"), blocks, mse, partial(program, second, 2))


def test_every_schedule_of_an_optimizer_gets_its_state(tmp_path: Path) -> None:
    def program(last: int, pipe: Pipeline) -> list[Any]:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        rates = [lr_scheduler.ExponentialLR(optimizer, gamma) for gamma in (0.5, 0.25)]
        checkpoints = pipe.checkpoints(tmp_path, optimizer, [*rates, lr_scheduler.StepLR(optimizer, 7)])
        for step in checkpoints.steps(last, every=1):
            pipe.step(*batch(step))
            optimizer.step()
            rates[0].step()
        return [(each.gamma, each.last_epoch) for each in rates]

    for last, ranks in ((2, 2), (3, 1)):
        found = on_ranks(plan_of(ranks, "single"), blocks, nn.functional.mse_loss, partial(program, last))
        assert found == [[(0.5, last), (0.25, 0)]] * ranks


class Position:
    """A loader with a state."""

    def __init__(self, at: int = 0):
        self.at = at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_new_ranks_get_the_state_that_all_ranks_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    restored: list[Any] = []
    monkeypatch.setattr(checkpoint_state, "_set_random_state", restored.append)

    def program(differs: bool, pipe: Pipeline) -> int:
        data = Position()
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        checkpoints = pipe.checkpoints(tmp_path / str(differs), optimizer, data=data)
        data.at += 3 + differs * pipe._transport.rank
        checkpoints.save(checkpoints.step + 1)
        checkpoints.finish()
        return data.at

    for differs in (False, True):
        for ranks in (2, 4):
            run, mse = partial(program, differs), nn.functional.mse_loss
            found = on_ranks(plan_of(ranks, "single"), blocks, mse, run)
            if not differs:
                assert found == [3 * ranks // 2] * ranks
                assert len(restored) == (0 if ranks == 2 else 4)
    assert all(isinstance(each, WorkerError) for each in found)
    assert "the data of rank" in str(found[2])


def test_groups_that_had_other_settings_do_not_become_one(tmp_path: Path) -> None:
    def apart(pipe: Pipeline) -> torch.optim.Optimizer:
        named = [*pipe.named_parameters()]
        return torch.optim.SGD([{"params": [p], "lr": 0.1 / (1 + int(name[0]))} for name, p in named], lr=0.1)

    (error,) = resumed_with(tmp_path, apart, lambda pipe: torch.optim.SGD(pipe.parameters(), lr=0.1))
    assert isinstance(error, InvalidRun)
    assert "lr" in str(error)


def test_a_layer_that_was_frozen_begins_as_new(tmp_path: Path) -> None:
    """It had no state and no settings, so its optimizer decides."""

    def half(pipe: Pipeline) -> torch.optim.Optimizer:
        some = [p for name, p in pipe.named_parameters() if not name.startswith("3.")]
        return torch.optim.AdamW(some, lr=0.1)

    def every(pipe: Pipeline) -> torch.optim.Optimizer:
        last = [p for name, p in pipe.named_parameters() if name.startswith("3.")]
        rest = [p for name, p in pipe.named_parameters() if not name.startswith("3.")]
        groups: list[dict[str, Any]] = [{"params": rest}, {"params": last, "lr": 0.7}]
        return torch.optim.AdamW(groups, lr=0.5)

    (rates,) = resumed_with(tmp_path, half, every)
    assert rates == {0.1, 0.7}


def test_a_state_with_keys_that_are_no_names_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    class Numbered(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # without a closure
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter][0] = 1

    for error in resumed_with(tmp_path, *[lambda pipe: Numbered(pipe.parameters(), lr=0.1)] * 2):
        assert isinstance(error, InvalidRun)
        assert "Numbered" in str(error)


def test_parameters_of_others_are_refused_at_once(tmp_path: Path) -> None:
    def more(pipe: Pipeline) -> torch.optim.Optimizer:
        return torch.optim.SGD([*pipe.parameters(), nn.Parameter(torch.ones(3))], lr=0.1)

    for error in resumed_with(tmp_path, more, more):
        assert isinstance(error, InvalidRun)
        assert "[3]" in str(error)


def test_a_rank_without_parameters_runs_the_same_loop(tmp_path: Path) -> None:
    """Stages 1 and 2 of the V have none."""

    def program(pipe: Pipeline) -> tuple[list[str], list[str]]:
        optimizer = torch.optim.AdamW(pipe.named_parameters(), lr=0.1)
        checkpoints = pipe.checkpoints(tmp_path, optimizer, lr_scheduler.LinearLR(optimizer))
        for step in checkpoints.steps(2, every=1):
            pipe.step(*batch(step))
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        return [name for name, _ in pipe.named_parameters()], [*pipe.state_dict()]

    def layers() -> list[nn.Module]:
        return [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]

    names = ["0.weight", "0.bias", "3.weight", "3.bias"]
    found = on_ranks(plan_of(2, "v"), layers, nn.functional.mse_loss, program)
    assert found == [(names, names), (["no_parameter"], [])]
    assert newest_checkpoint(tmp_path) == tmp_path / "step-00000002.g1"
