"""The memory that a rank holds follows the plan's account, action by action."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from zbv_worker.host.local_ranks import LocalRanks, python_command
from zbv_worker.measure.live_bytes import LiveBytes


@pytest.mark.parametrize(("p", "tolerance"), [(1, 0.005), (2, 0.05)])
def test_the_memory_of_microbatches_of_different_lengths_follows_the_plan(
    p: int, tolerance: float, tmp_path: Path
) -> None:
    """The account is a fixed part and one per token."""
    with LocalRanks([python_command("support.memory_rank", str(tmp_path))] * p, tmp_path / "logs") as ranks:
        ranks.wait(240)
    for rank in range(p):
        for found in json.loads((tmp_path / f"rank-{rank}.json").read_text()):
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
