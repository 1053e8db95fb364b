"""Fixtures of the worker's tests."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from support.rank_fixtures import no_environment, one_compute_thread, ranks_are_forked

__all__ = ["no_environment", "one_compute_thread", "ranks_are_forked"]


_MANY_MODULES = 50
_modules_before = [0]


@pytest.fixture(autouse=True)
def later_imports_are_never_garbage() -> None:
    """Exclude from garbage collection what tests have imported.

    Torch imports much at the first optimizer. A run collects garbage after its first step, which would take
    half of the time of a short one.
    """
    if len(sys.modules) > _modules_before[0] + _MANY_MODULES:
        gc.collect()
        gc.freeze()
        _modules_before[0] = len(sys.modules)


@pytest.fixture
def compiled_without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.compile`` traces forward and backward, but generates no code, which takes most of its time."""
    compiled = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda layer, dynamic, options: compiled(layer, dynamic=dynamic, backend="aot_eager"),
    )
