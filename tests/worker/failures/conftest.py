"""Fixtures of tests of failures."""

from __future__ import annotations

import pytest
from support.processes import DEADLINE
from zbv_worker.failures import liveness


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """To remove a duty waits until it does not run, and gives up after ten beats of five seconds in all."""
    monkeypatch.setattr(liveness, "BEAT_SECONDS", DEADLINE / 10)
