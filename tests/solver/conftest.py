"""Less work for baselines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from zbv_solver.partition import descent


@pytest.fixture(scope="module", autouse=True)
def _little_effort() -> Iterator[None]:
    """Of layers, each plan has a cut for every classical schedule: its search times a tenth of the usual."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(descent, "ACTIONS", descent.ACTIONS // 10)
        yield
