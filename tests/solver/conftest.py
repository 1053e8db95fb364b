"""Less work for layers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from zbv_solver.partition import descent
from zbv_solver.search.layered import JUDGED


@pytest.fixture(scope="module", autouse=True)
def _little_effort() -> Iterator[None]:
    """Few cuts are estimated, and few are timed for the baselines, each of which has its own cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(descent, "ACTIONS", descent.ACTIONS // 100)
        patch.setitem(JUDGED, "quick", JUDGED["quick"] // 10)
        yield
