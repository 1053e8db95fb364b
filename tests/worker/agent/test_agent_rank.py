"""A rank's report of its failure: rank, step, action and peer, as far as known."""

from __future__ import annotations

import pytest
from zbv_solver.plans.orders import Action
from zbv_worker.agent.rank import _failure
from zbv_worker.errors import ChannelTimeout, Disagreement, InvalidRun, PeerLost, Superseded, WorkerError
from zbv_worker.execution.progress import CurrentProgress, Progress, attach_progress


class At(CurrentProgress):
    """A rank in step 7."""

    def read(self) -> Progress:
        return Progress(7, "2I1", 3)


def failure(error: Exception, at: CurrentProgress) -> tuple[object, ...]:
    found = _failure(4, error, "what happened", at)
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
        (WorkerError("x"), "error"),
    ],
)
def test_repeatable_errors_are_distinguished_from_those_of_a_peer(error: Exception, kind: str) -> None:
    assert failure(error, CurrentProgress())[0] == kind
