"""A stranger can follow a search: it passes through few functions and modules of the service."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.walk import FETCH, modules, walk

pytestmark = pytest.mark.anyio


async def test_the_walk_from_a_search_to_the_fetch_of_a_rank_is_short(tmp_path: Path) -> None:
    """``python -m tests.support.walk`` lists the functions."""
    done = await walk(tmp_path)
    assert len(done.whole) <= 160
    assert len(modules(done.whole)) <= 25
    assert len(done.parts[FETCH]) <= 15
