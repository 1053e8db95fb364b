"""If a loss or gradient is not finite, the run fails or skips the step, on all ranks."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gradients import relative_error
from support.plans import random_plan
from support.thread_transport import ThreadHub, ThreadTransport
from support.trained import Remembering, Trained, train_in_threads
from torch import Tensor
from zbv_worker.errors import NotFinite, WorkerError
from zbv_worker.gradients.gradients import Gradients
from zbv_worker.gradients.loss_scale import LossScale
from zbv_worker.run.options import TrainingOptions
from zbv_worker.run.update import NonFinite, Update
from zbv_worker.stage.program import Precision

STEPS = 3


class NotFiniteInStep1(Remembering):
    """In the second step, one microbatch has another loss, or gradients that are not finite."""

    def __init__(self, value: float = math.nan, gradient_only: bool = False):
        super().__init__()
        self._value, self._gradient_only = value, gradient_only
        self._x = float(self.microbatch(1, 1)[1].flatten()[0])

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        loss = super().loss(output, target)
        if float(target.flatten()[0]) != self._x:
            return loss
        if self._gradient_only:
            steep: Tensor = Steep.apply(loss)  # type: ignore[no-untyped-call]  # torch's own
            return loss + steep
        return loss * self._value if math.isnan(self._value) else loss + self._value


class Steep(torch.autograd.Function):
    """Zero, with an infinite slope."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.full_like(gradients[0], math.inf)


def train(steps: int, value: float = math.nan, gradient_only: bool = False, **options: Any) -> Trained:
    def model() -> NotFiniteInStep1:
        return NotFiniteInStep1(value, gradient_only)

    return train_in_threads(*random_plan(), TrainingOptions(**options), steps, model=model)


def events(found: Trained) -> list[tuple[int, str, str]]:
    """The events of all ranks: step, what, value."""
    said = [event for report in found.reports for event in report.events if event["kind"] == "non_finite"]
    return sorted({(event["step"], event["what"], event["value"]) for event in said})


@cache
def first_step(clip_norm: float | None, replicas: int, precision: Precision = "float32") -> Trained:
    """A run that ends before anything is not finite."""
    found = train(1, non_finite="skip", clip_norm=clip_norm, replicas=replicas, precision=precision)
    assert not events(found)
    return found


@pytest.mark.parametrize(
    ("value", "gradient_only", "clip_norm", "replicas"),
    [(math.nan, False, None, 1), (math.inf, False, 0.5, 2), (0.0, True, None, 1)],
)
def test_a_skipped_step_changes_nothing_on_any_rank_and_is_an_event(
    value: float, gradient_only: bool, clip_norm: float | None, replicas: int
) -> None:
    found = train(2, value, gradient_only, non_finite="skip", clip_norm=clip_norm, replicas=replicas)
    for report in found.reports:
        assert [line.updated.is_skipped for line in report.lines] == [False, True]
    for mine, theirs in zip(found.parameters, first_step(clip_norm, replicas).parameters, strict=True):
        assert relative_error(mine, theirs) == 0.0
    whats = [(step, what) for step, what, _ in events(found)]
    assert whats == ([(1, "gradient norm")] if gradient_only else [(1, what) for what in WHATS[value]])


WHATS = {math.nan: ["gradient norm", "loss"], math.inf: ["loss"], 0.0: ["gradient norm"]}


@pytest.mark.parametrize(
    ("options", "gradient_only"),
    [({"clip_norm": 0.5, "replicas": 2}, False), ({"precision": "bfloat16"}, True)],
)
def test_by_default_the_run_fails_and_says_where(options: dict[str, Any], gradient_only: bool) -> None:
    with pytest.raises(WorkerError) as raised:
        train(STEPS, math.nan, gradient_only, **options)
    # Another rank may have lost its peer first.
    if isinstance(raised.value, NotFinite):
        assert "step 1: the " in str(raised.value)
        assert "--non-finite skip" in str(raised.value)


def test_the_line_of_a_step_says_skipped_only_if_the_run_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WorkerError):
        train(2, math.nan)
    (failing,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step 1: loss")]
    assert failing.endswith(" s, not finite")
    train(2, math.nan, non_finite="skip")
    (skipped,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step 1: loss")]
    assert skipped.endswith(" s, not finite: skipped")


def test_continue_applies_the_step_and_reports_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = train(2, math.nan, non_finite="continue", clip_norm=0.5)
    assert (1, "loss", "nan") in events(found)
    assert "step 1: the loss is nan\n" in capsys.readouterr().err
    for rank, report in enumerate(found.reports):
        document = json.dumps(report.document(), allow_nan=False)
        assert ('"loss": "nan"' in document) == (rank == 0)
    assert any(not torch.isfinite(p).all() for p in found.parameters[0].values())


@pytest.mark.parametrize("non_finite", ["fail", "skip", "continue"])
def test_a_float16_overflow_is_skipped_and_is_an_event_only_at_scale_1(
    non_finite: NonFinite, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = train(2, 0.0, True, precision="float16", non_finite=non_finite)
    assert [line.updated.is_skipped for line in found.reports[0].lines] == [False, True]
    assert relative_error(found.parameters[0], first_step(None, 1, "float16").parameters[0]) < 1e-5
    assert events(found) == []
    monkeypatch.setattr(LossScale, "of", classmethod(lambda cls, _: cls(1.0, True)))
    if non_finite == "fail":
        with pytest.raises(NotFinite, match="step 1"):
            train(2, 0.0, True, precision="float16")
    elif non_finite == "skip":
        found = train(2, 0.0, True, precision="float16", non_finite="skip")
        assert [what for _, what, _ in events(found)] == ["gradient norm"]


def test_every_rank_fails_alike_where_they_share_the_norm() -> None:
    """No rank waits in the next step for a peer that has ended."""

    def work(transport: ThreadTransport) -> Any:
        module = torch.nn.Linear(2, 2)
        gradients = Gradients({0: module})
        gradients.begin()
        module(torch.ones(1, 2)).sum().backward()
        update = Update(Remembering(), gradients, transport, LossScale(), 1.0)
        numbers = update.launch(10.0, torch.tensor(math.nan) if transport.rank == 1 else None)
        return update.settle([float(number) for number in numbers])

    answers = ThreadHub(2).run(work)
    assert all(answer.is_failed and answer.is_skipped for answer in answers)
    assert str(answers[1].non_finite[0]) == "('loss', nan)"


def test_events_are_in_a_file_for_the_agent_before_the_run_ends(tmp_path: Path) -> None:
    with pytest.raises(WorkerError):
        train(STEPS, math.nan, trace_dir=tmp_path)
    found = [json.loads(path.read_text()) for path in tmp_path.glob("events-*.json")]
    said = [event for document in found for event in document["events"] if event["kind"] == "non_finite"]
    assert {"kind": "non_finite", "step": 1, "what": "loss", "value": "nan"} in said
