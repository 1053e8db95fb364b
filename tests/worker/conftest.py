"""Fixtures of the worker's tests."""

from __future__ import annotations

import pytest
import torch
from support.rank_fixtures import no_environment, one_compute_thread, ranks_are_forked

__all__ = ["no_environment", "one_compute_thread", "ranks_are_forked"]


@pytest.fixture
def compiled_without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.compile`` traces forward and backward, but generates no code, which takes most of its time."""
    compiled = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda layer, dynamic, options: compiled(layer, dynamic=dynamic, backend="aot_eager"),
    )
