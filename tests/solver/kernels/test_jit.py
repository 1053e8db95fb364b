"""Cached machine code is never stale: a changed kernel also changes its callers in other files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from zbv_solver.kernels.jit import drop_stale_code


@pytest.mark.parametrize(("is_older", "remains"), [(True, False), (False, True)])
def test_cached_code_older_than_any_kernel_is_deleted(tmp_path: Path, is_older: bool, remains: bool) -> None:
    folder = tmp_path / "construct" / "__pycache__"
    folder.mkdir(parents=True)
    caller = folder / "caller.schedule-12.py311.nbi"
    callee = tmp_path / "callee.py"
    plain = tmp_path / "plain.py"
    caller.touch()
    callee.write_text("from zbv_solver.kernels.jit import compiled\n")
    plain.write_text("print('no kernels here')\n")
    os.utime(caller, ns=(2_000, 2_000))
    os.utime(callee, ns=(3_000 if is_older else 1_000,) * 2)
    os.utime(plain, ns=(9_000, 9_000))
    drop_stale_code(tmp_path)
    assert caller.exists() == remains
