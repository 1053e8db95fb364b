"""Less work for quick searches of cuts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from zbv_models.fixed_orders.order_search import ACTIONS, ROUNDS, SCREENED
from zbv_solver.partition import descent
from zbv_solver.search.layered import JUDGED


@pytest.fixture(scope="module", autouse=True)
def _little_effort() -> Iterator[None]:
    """Descents time a hundredth of the usual, and bounds take a tenth of the linear programs.

    The cuts of few layers are all timed as well.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(descent, "ACTIONS", descent.ACTIONS // 100)
        for budget, part in ((SCREENED, 100), (ACTIONS, 100), (ROUNDS, 10), (JUDGED, 10)):
            patch.setitem(budget, "quick", budget["quick"] // part)
        yield
