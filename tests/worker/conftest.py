"""Fixtures of the worker's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.forked_ranks import fork_process
from zbv_worker.host import local_ranks as launch


@pytest.fixture(scope="package", autouse=True)
def _one_compute_thread() -> None:
    """Ranks that are threads share the cores; their tensors are too small to be shared out again."""
    torch.set_num_threads(1)


@pytest.fixture(scope="package", autouse=True)
def _ranks_are_forked() -> Iterator[None]:
    """Local ranks come from a process that has imported torch: most of a short run's time is that import.

    Ranks that agents, torchrun or the demonstration start are started as ever.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "start_process", fork_process)
        yield
