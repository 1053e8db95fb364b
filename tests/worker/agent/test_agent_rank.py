"""A rank's report of its failure: rank, step, action and peer, as far as known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from zbv_solver.plans.orders import Action
from zbv_worker.agent.rank import _options
from zbv_worker.checkpoints.checkpoint import CheckpointOptions
from zbv_worker.errors import (
    ChannelTimeout,
    Disagreement,
    InvalidRun,
    PeerLost,
    StorageFailed,
    Superseded,
    WorkerError,
)
from zbv_worker.failures.progress import CurrentProgress, Progress, attach_progress, failure_of
from zbv_worker.stage.program import Program


class At(CurrentProgress):
    """A rank in step 7."""

    def read(self) -> Progress:
        return Progress(7, "2I1", 3)


def failure(error: Exception, at: CurrentProgress) -> tuple[object, ...]:
    found = failure_of(4, error, "what happened", at.read())
    assert found["detail"] == "what happened"
    return tuple(found[name] for name in ("kind", "rank", "step", "action", "peer"))


def test_an_error_in_an_action_has_its_step_action_and_peer() -> None:
    error = ChannelTimeout("x")
    attach_progress(error, Progress(6, str(Action(2, "I", 1)), 5))
    assert failure(error, At()) == ("peer", 4, 6, str(Action(2, "I", 1)), 5)


def test_an_error_between_actions_has_only_a_step() -> None:
    assert failure(RuntimeError("x"), At()) == ("error", 4, 7, None, None)
    assert failure(RuntimeError("x"), CurrentProgress()) == ("error", 4, None, None, None)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PeerLost("x"), "peer"),
        (InvalidRun("x"), "invalid"),
        (Disagreement("x"), "invalid"),
        (Superseded("x"), "invalid"),
        (StorageFailed("x"), "error"),
        (WorkerError("x"), "error"),
    ],
)
def test_repeatable_errors_are_distinguished_from_those_of_a_peer(error: Exception, kind: str) -> None:
    assert failure(error, CurrentProgress())[0] == kind


def work(**options: object) -> dict[str, Any]:
    """The order of a service, with the options that every service sends."""
    sent = {"backend": "gloo", "timeout": 9.0, "threads": 1, "data_parallel": 2, "shard": False}
    more: dict[str, Any] = {
        "precision": "bfloat16",
        "clip_norm": None,
        "evaluate_every": None,
        "checkpoint": None,
    }
    more |= {"startup_timeout": 5.0, "compile": False}
    more |= {"main_gradients": True, "accumulate": 1, "non_finite": "fail"}
    model = {"factory": "a.b:c", "arguments": {}, "seed": 0}
    order = {"plan_id": "0" * 64, "model": model, "steps": 3, "run_id": "r", "generation": 2}
    return {
        "server": "http://planner",
        "allowed_models": ["a.*"],
        "work": {**order, "options": {**sent, **more, **options}},
    }


def test_the_options_of_a_run_reach_its_training(tmp_path: Path) -> None:
    checkpoint = {"directory": "/shared", "every": 5, "timeout": 60.0, "sync": True}
    found = _options(
        work(
            **{"startup_timeout": 77.0, "compile": True, "main_gradients": False, "accumulate": 4},
            **{"checkpoint": checkpoint, "non_finite": "skip"},
        ),
        tmp_path,
    )
    assert (found.training.parts, found.training.non_finite) == (4, "skip")
    assert (found.timeout, found.startup_timeout) == (9.0, 77.0)
    assert found.training.program == Program("bfloat16", is_compiled=True, has_main_gradients=False)
    assert found.training.checkpoint == CheckpointOptions(
        Path("/shared"), 5, timeout=60.0, is_synchronous=True, run="r", attempt=2
    )
