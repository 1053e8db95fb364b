"""Less work for quick searches of cuts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from zbv_models.fixed_orders.order_search import ACTIONS, SCREENED
from zbv_solver.partition import descent


@pytest.fixture(scope="module", autouse=True)
def _little_effort() -> Iterator[None]:
    """Descents time a tenth of the usual. The cuts of few layers are all timed as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(descent, "ACTIONS", descent.ACTIONS // 10)
        for budget in (SCREENED, ACTIONS):
            patch.setitem(budget, "quick", budget["quick"] // 10)
        yield
