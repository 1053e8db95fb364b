"""A stranger can follow a search: it passes through few functions and modules of the service."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from support.walk import FETCH, modules, walk

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(("auth", "functions", "of_a_fetch"), [("none", 115, 11), ("tokens", 120, 15)])
async def test_the_walk_from_a_search_to_the_fetch_of_a_rank_is_short(
    tmp_path: Path, auth: Literal["none", "tokens"], functions: int, of_a_fetch: int
) -> None:
    """``PYTHONPATH=tests python -m support.walk`` lists the functions."""
    done = await walk(tmp_path, auth)
    assert len(done.whole) <= functions
    assert len(modules(done.whole)) <= 25
    assert len(done.parts[FETCH]) <= of_a_fetch
