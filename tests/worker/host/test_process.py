"""Compute threads per rank: a fair share of the host's cores and the container's CPU time."""

from __future__ import annotations

from pathlib import Path

import pytest
from zbv_worker.host import process


@pytest.mark.parametrize(
    ("cores", "ranks", "quota", "local", "threads"),
    [
        (2, 2, None, 1, 1),  # two agents of one rank each on a host of two cores
        (16, 4, None, 4, 4),
        (16, 1, "max 100000", 1, 16),
        (16, 2, "400000 100000", 1, 4),  # two containers of four CPUs each
        (2, 8, None, 8, 1),
        (7, 2, None, 2, 3),
    ],
)
def test_ranks_share_cores_and_the_time_of_their_container(
    cores: int,
    ranks: int,
    quota: str | None,
    local: int,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(process, "usable_cores", lambda: list(range(cores)))
    file = tmp_path / "cpu.max"
    if quota is not None:
        file.write_text(quota)
    monkeypatch.setattr(process, "_CPU_QUOTA", file)
    assert process.threads_per_rank(ranks, local) == threads
