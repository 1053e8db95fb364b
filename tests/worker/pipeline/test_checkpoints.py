"""Checkpoints of a pipeline in one process; two ranks and meshes are tested with the pipelines themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zbv_worker as zbv
from torch import nn
from torch.nn import functional as nnf
from zbv_solver.plans.plan import Plan


def layers(depth: int = 3) -> list[Callable[[], nn.Module]]:
    return [lambda: nn.Linear(4, 4)] * depth


class Loader:
    """A data set with a position."""

    def __init__(self) -> None:
        self.position = 0

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.position += 1
        generator = torch.Generator().manual_seed(self.position)
        return torch.randn(4, 4, generator=generator), torch.randn(4, 4, generator=generator)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def trained(
    plan: Plan, folder: Path, steps: int, optimizer: Any = torch.optim.AdamW, depth: int = 3
) -> tuple[Loader, list[torch.Tensor], int]:
    """The loader, the parameters with a random number, and the step that training began with."""
    loader = Loader()
    torch.manual_seed(1)  # without the checkpoint's state, numbers would repeat
    with zbv.Pipeline(plan, layers(depth), nnf.mse_loss) as pipe:
        made = optimizer(pipe.named_parameters(), lr=0.1)
        checkpoints = pipe.checkpoints(folder, made, data=loader)
        first = checkpoints.step
        for _ in checkpoints.steps(steps, every=2):
            pipe.step(*loader.next())
            made.step()
            made.zero_grad()
            torch.rand(1)  # as dropout would
        return loader, [*(p.detach().clone() for p in pipe.parameters()), torch.rand(1)], first


def test_training_resumes_to_the_last_bit_with_data_and_random_numbers(plan: Plan, tmp_path: Path) -> None:
    _, expected, _ = trained(plan, tmp_path / "at once", 5)
    trained(plan, tmp_path / "parts", 3)
    loader, found, first = trained(plan, tmp_path / "parts", 5)
    assert (first, loader.position) == (3, 5)
    assert all(map(torch.equal, found, expected))
    written = {path.name for path in (tmp_path / "parts").glob("step-*")}
    assert written == {"step-00000003.g1", "step-00000004.g2", "step-00000005.g2"}


def test_a_new_optimizer_resumes_although_its_parameters_have_gradients(plan: Plan, tmp_path: Path) -> None:
    trained(plan, tmp_path, 2)
    with zbv.Pipeline(plan, layers(), nnf.mse_loss) as pipe:
        optimizer = torch.optim.AdamW(pipe.named_parameters())
        pipe.step(*Loader().next())
        before = [p.grad for p in pipe.parameters()]
        pipe.checkpoints(tmp_path, optimizer)
        assert all(p.grad is grad for p, grad in zip(pipe.parameters(), before, strict=True))
        assert len(optimizer.state) == len(before)
        assert optimizer.param_groups[0]["lr"] == 0.1
        assert optimizer.param_groups[0]["param_names"] == [name for name, _ in pipe.named_parameters()]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"depth": 2}, r"belongs to another model \(it has 2\.weight\)"),
        ({"depth": 4}, r"belongs to another model \(it lacks 3\.weight\)"),
        ({"optimizer": torch.optim.Adagrad}, r"it lacks .* of the optimizer"),
    ],
)
def test_a_checkpoint_of_other_layers_or_another_optimizer_is_refused(
    plan: Plan, tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    trained(plan, tmp_path, 1)
    with pytest.raises(zbv.InvalidRun, match=message):
        trained(plan, tmp_path, 2, **more)


def test_two_directories_of_one_pipeline_are_independent(plan: Plan, tmp_path: Path) -> None:
    with zbv.Pipeline(plan, layers(), nnf.mse_loss) as pipe:
        optimizers = [torch.optim.SGD([p], lr=0.1) for p in pipe.parameters()]
        every, best = (pipe.checkpoints(tmp_path / name, optimizers) for name in ("every", "best"))
        for step in every.steps(3, every=1):
            pipe.step(*Loader().next())
            if step == 1:
                best.save(step + 1)
    assert [path.name for path in (tmp_path / "best").glob("step-*")] == ["step-00000002.g1"]
    assert len(list((tmp_path / "every").glob("step-*"))) == 3


def test_wrong_arguments_are_refused_and_leave_the_pipeline_usable(plan: Plan, tmp_path: Path) -> None:
    with zbv.Pipeline(plan, layers(), nnf.mse_loss) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        wrong: Any = object()
        for arguments, message in (
            ((None,), "found a NoneType as the optimizer; must be a torch.optim.Optimizer"),
            ((optimizer, wrong), "schedule is a object; must have state_dict"),
            (([optimizer, wrong],), "found a object as the optimizer"),
        ):
            with pytest.raises(zbv.InvalidRun, match=message):
                pipe.checkpoints(tmp_path, *arguments)
        with pytest.raises(zbv.InvalidRun, match="data is a object; must have state_dict"):
            pipe.checkpoints(tmp_path, optimizer, data=wrong)
        checkpoints = pipe.checkpoints(tmp_path, optimizer)
        with pytest.raises(zbv.InvalidRun, match="found every=0; must be at least 1"):
            next(checkpoints.steps(3, every=0))
        with pytest.raises(zbv.InvalidRun, match=r"found step 0 to save.*Begin the loop at checkpoints\.s"):
            checkpoints.save(0)
        pipe.step(*Loader().next())
        checkpoints.save(1)


def test_a_directory_that_cannot_be_written_is_named(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with zbv.Pipeline(plan, layers(), nnf.mse_loss) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        with pytest.raises(zbv.InvalidRun, match=r"checkpoints in .*below: Not a directory"):
            pipe.checkpoints(tmp_path / "file" / "below", optimizer)


def test_a_pipeline_that_is_dropped_completes_its_checkpoint(plan: Plan, tmp_path: Path) -> None:
    pipe = zbv.Pipeline(plan, layers(), nnf.mse_loss)
    pipe.checkpoints(tmp_path, torch.optim.SGD(pipe.parameters(), lr=0.1)).save(1)
    del pipe
    assert not dist.is_initialized()
    assert (tmp_path / "step-00000001.g1" / "index.json").exists()
