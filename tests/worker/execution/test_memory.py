"""The memory that a rank holds follows the plan's account, action by action."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.rank_files import found_by
from zbv_worker.measure.live_bytes import LiveBytes


@pytest.mark.parametrize(("p", "tolerance", "seeds"), [(1, 0.005, "34"), (2, 0.05, "3")])
def test_the_memory_of_microbatches_of_different_lengths_follows_the_plan(
    p: int, tolerance: float, seeds: str, tmp_path: Path
) -> None:
    """The account is a fixed part and one per token. An odd seed's plan has copies to the host."""
    for of_rank in found_by("memory_rank", p, tmp_path, *seeds):
        for found in of_rank.values():
            largest = max(found["expected"])
            assert largest > 1e6
            differences = [abs(a - b) for a, b in zip(found["seen"], found["expected"], strict=True)]
            assert max(differences) <= tolerance * largest
            assert max(found["seen"]) == pytest.approx(largest, rel=tolerance)


def test_the_peak_is_the_largest_number_of_live_bytes_since_the_restart() -> None:
    with LiveBytes() as live:
        kept = torch.zeros(1000)
        dropped = torch.zeros(2000)
        del dropped
        later = torch.zeros(500)
        assert (live.bytes, live.peak) == (6000, 12000)
        live.restart()
        assert live.peak == live.bytes == 6000
        del kept, later
        assert (live.bytes, live.peak) == (0, 6000)
