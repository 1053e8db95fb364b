"""Fixtures for tests that start ranks; a folder's conftest imports them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from zbv_worker.host import local_ranks

from support.forked_ranks import fork_process

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="package", autouse=True)
def one_compute_thread() -> None:
    """Use one compute thread per rank: the tensors are too small for more, and ranks share the cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="package", autouse=True)
def ranks_are_forked() -> Iterator[None]:
    """Fork local ranks from a process that has imported torch, because the import takes most of a short run.

    Agents and torchrun start their ranks as usual.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_ranks, "start_process", fork_process)
        yield


@pytest.fixture
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process sees no torchrun, as in a notebook."""
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
