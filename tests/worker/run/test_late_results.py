"""On a GPU the host never waits within a step, except for its limited lead; results come one step late.

A simulated GPU stands in for the device: tensors are on the CPU, but events, and copies to pinned memory, run
when the device gets to them. Everything that would make the host wait for a device tensor is counted.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_cuda import FakeCuda, HostOfDevice, HostWaits
from support.plans import V_OF_TWO, unit_problem
from support.thread_pipeline import on_ranks, plan_of, returned
from support.thread_transport import ThreadHub, ThreadTransport
from support.trained import CPU, Remembering, train_in_threads
from torch import Tensor, nn
from zbv_solver.plans.orders import Orders
from zbv_worker.checkpoints.checkpoint import CheckpointOptions
from zbv_worker.errors import NotFinite
from zbv_worker.execution import executor
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.execution.timeline import CudaTimeline
from zbv_worker.model.spec import ModelSpec
from zbv_worker.pipeline import calls
from zbv_worker.pipeline import rank as pipeline_rank
from zbv_worker.pipeline.pipeline import Pipeline
from zbv_worker.run.loop import Loop
from zbv_worker.run.options import RunOptions, TrainingOptions
from zbv_worker.stage.stage import Stage

ALONE = Orders.from_text(
    [["0F0", "1F0", "1I0", "0F1", "0I0", "1W0", "1F1", "1B1", "0W0", "0B1", "0F2", "1F2", "1B2", "0B2"]]
)
STEPS = 4


class OnDevice(ThreadTransport):
    """Sums over ranks without the host, as NCCL does."""

    def sum_over_ranks(self, values: Tensor, timeout: float) -> Tensor:
        return values.clone()


class NotFiniteAt(Remembering):
    """The loss of one step is not finite."""

    def __init__(self, step: int | None = None, fused: bool = False):
        super().__init__(0)
        self._fused = fused
        self._x = math.nan if step is None else float(self.microbatch(step, 1)[1].flatten()[0])

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        is_bad = target.flatten()[0] == self._x
        return super().loss(output, target) * torch.where(is_bad, math.nan, 1.0)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        fused, plain = partial(torch.optim.AdamW, fused=True), partial(torch.optim.SGD, momentum=0.9)
        return (fused if self._fused else plain)(parameters, lr=0.05)

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def on_fake_gpu(monkeypatch: pytest.MonkeyPatch, cuda: Callable[[], FakeCuda]) -> None:
    """Give every executor a timeline of a simulated GPU, on which each action takes 3 ms."""

    def timeline() -> CudaTimeline:
        device = cuda()
        return CudaTimeline(CPU, HostOfDevice(device), 4, device, pin=False)

    for name in ("forward", "backward", "backward_input", "backward_weight"):
        plain = getattr(Stage, name)

        def slow(self: Stage, *args: Any, _plain: Any = plain, **kwargs: Any) -> Any:
            cuda().compute.compute(3.0)
            return _plain(self, *args, **kwargs)

        monkeypatch.setattr(Stage, name, slow)
    monkeypatch.setattr(executor, "HostTimeline", timeline)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """The simulated GPU of every executor."""
    made = FakeCuda()
    on_fake_gpu(monkeypatch, lambda: made)
    return made


def training_of(model: Remembering, steps: int = STEPS, **options: Any) -> Loop:
    plan = RankPlan.of("plan", unit_problem(1, 3), ALONE, 0)
    run = RunOptions((), ModelSpec("tests:model"), steps, training=TrainingOptions(**options))
    return Loop(run, plan, model, OnDevice(ThreadHub(1), 0), CPU)


def train(model: Remembering, steps: int = STEPS, **options: Any) -> Loop:
    training = training_of(model, steps, **options)
    for step in range(steps):
        training.step(step)
    training.end()
    training.close()
    return training


@pytest.mark.parametrize(
    ("options", "bad_step"),
    [
        ({}, None),
        ({"non_finite": "continue"}, 2),
        ({"clip_norm": 0.1}, None),
        ({"clip_norm": 0.1, "non_finite": "skip"}, 2),
    ],
)
def test_the_host_never_waits_for_the_device_within_a_step_except_for_its_limited_lead(
    options: dict[str, Any], bad_step: int | None, cuda: FakeCuda
) -> None:
    training = training_of(NotFiniteAt(bad_step, fused=True), **options)
    with HostWaits(cuda) as waits:
        for step in range(STEPS):
            training.step(step)
    assert waits.found == []
    assert set(waits.polled) == {"make_room"}
    assert len(training.report.lines) == STEPS - 1  # the newest step is not known yet
    training.end()
    assert len(training.report.lines) == STEPS


def test_the_count_of_host_waits_sees_each_kind() -> None:
    cuda = FakeCuda()
    tensor = torch.ones(2)
    kinds: list[Callable[[], object]] = [
        lambda: float(tensor[0]),
        lambda: bool(tensor[0] > 0),
        lambda: tensor[0].item(),
        lambda: tensor.tolist(),
        lambda: tensor.cpu(),
        lambda: tensor.numpy(),
        lambda: tensor.to("cpu"),
        lambda: torch.empty(2).copy_(tensor),
        lambda: tensor.nonzero(),
        lambda: tensor[tensor > 0],
        lambda: torch.equal(tensor, tensor),
        lambda: cuda.Event(enable_timing=True).synchronize(),
        lambda: torch.cuda.synchronize(),
        lambda: int(tensor[0]),
    ]
    for kind in kinds:
        with HostWaits(cuda) as waits:
            kind()
        assert waits.found, kinds.index(kind)


@pytest.mark.parametrize(
    ("options", "bad_step", "fused"),
    [
        ({"non_finite": "continue"}, 2, False),
        ({"non_finite": "skip"}, 2, True),
        ({"clip_norm": 0.1, "non_finite": "skip"}, 2, False),
    ],
)
def test_late_results_are_those_of_a_run_that_waits(
    options: dict[str, Any], fused: bool, bad_step: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for is_late in (False, True):
        if is_late:
            cuda = FakeCuda()
            on_fake_gpu(monkeypatch, lambda cuda=cuda: cuda)  # type: ignore[misc]  # mypy cannot infer it
        model = NotFiniteAt(bad_step, fused)
        training = train(model, **options)
        lines = [
            (line.step, str(line.loss), str(line.updated.gradient_norm), line.updated.is_skipped)
            for line in training.report.lines
        ]
        rates = [group["lr"] for group in training._update.optimizer.param_groups]  # type: ignore[union-attr]
        found.append((lines, list(training.report.events), rates, model.parameters))
    (lines, events, rates, expected), (late_lines, late_events, late_rates, parameters) = found
    assert late_lines == lines
    assert [line[0] for line in lines] == list(range(STEPS))
    assert late_events == events
    taken = sum(not is_skipped for *_, is_skipped in lines)
    assert late_rates == rates == pytest.approx([0.05 * 0.5**taken])
    torch.testing.assert_close(parameters, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("replicas", "options"), [(1, {"clip_norm": 0.1}), (2, {"precision": "float16"})])
def test_ranks_and_replicas_agree_with_a_run_that_waits(
    options: dict[str, Any], replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = unit_problem(2, 2), V_OF_TWO, TrainingOptions(replicas=replicas, **options), STEPS
    early = train_in_threads(*run)
    devices: dict[int, FakeCuda] = defaultdict(FakeCuda)  # by rank, which is a thread
    on_fake_gpu(monkeypatch, lambda: devices[threading.get_ident()])
    late = train_in_threads(*run)
    assert early.losses == late.losses
    torch.testing.assert_close(late.parameters, early.parameters, rtol=0, atol=0)


@pytest.mark.usefixtures("cuda")
def test_a_failing_step_is_never_saved(tmp_path: Path) -> None:
    training = training_of(
        NotFiniteAt(2, fused=True), steps=9, checkpoint=CheckpointOptions(tmp_path, every=3), clip_norm=0.1
    )
    for step in range(3):
        training.step(step)
    with pytest.raises(NotFinite, match="rank 0, step 2: the loss is nan"):
        training.step(3)  # before which a checkpoint is due
    assert not list(tmp_path.glob("step-*3*"))


@pytest.mark.usefixtures("cuda")
def test_the_last_steps_failure_is_not_lost() -> None:
    with pytest.raises(NotFinite, match="step 3"):
        train(NotFiniteAt(3))


def test_float16_and_unfused_optimizers_wait_for_the_device(cuda: FakeCuda) -> None:
    assert training_of(NotFiniteAt(), precision="float16")._update.must_wait
    for fused in (False, True):
        training = training_of(NotFiniteAt(fused=fused), non_finite="skip")
        assert not training._update.must_wait
        with HostWaits(cuda) as waits:
            training.step(0)
        assert bool(waits.found) == (not fused)


@pytest.mark.usefixtures("cuda")
def test_an_evaluation_reports_the_step_before_it_first() -> None:
    training = training_of(NotFiniteAt(), evaluate_every=2)
    seen, evaluate = list[int](), training._evaluate

    def watched(step: int) -> None:
        seen.append(len(training.report.lines))
        evaluate(step)

    training._evaluate = watched  # type: ignore[method-assign]
    for step in range(STEPS):
        training.step(step)
    assert seen == [0, 2]
    assert sorted(training.report.evaluations) == [0, 2]


def weighted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return nn.functional.mse_loss(output, target, reduction="sum"), target.abs().sum()


def test_the_host_never_waits_in_a_step_of_a_pipeline(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Apart from two reads of host memory: samples of the batch, and a number of the host's generator."""
    cuda = FakeCuda()
    monkeypatch.setattr(ThreadTransport, "sum_over_ranks", OnDevice.sum_over_ranks)
    monkeypatch.setattr(calls, "_contents", lambda value, **_: 0)
    monkeypatch.setattr(pipeline_rank, "numbers_of_place", lambda *_, **__: nullcontext())
    on_fake_gpu(monkeypatch, lambda: cuda)

    def program(pipe: Pipeline) -> list[float]:
        optimizer = torch.optim.AdamW(pipe.parameters(), fused=True)
        x, y, losses = torch.ones(6, 4), torch.ones(6, 4), [pipe.step(torch.ones(6, 4), torch.ones(6, 4))]
        with HostWaits(cuda) as waits:
            for _ in range(3):
                losses.append(pipe.step(x, y))
                pipe.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
        assert waits.found == []
        assert set(waits.polled) == {"make_room"}
        return [float(each) for each in losses]

    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(2)]
    (late,) = returned(on_ranks(plan_of(1, "v", 3), lambda: layers, weighted, program))
    assert late[0] > late[-1]
