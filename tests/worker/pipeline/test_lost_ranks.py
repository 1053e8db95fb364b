"""Three real ranks over gloo, of which one leaves its pipeline: the others name it, and end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.failing_ranks import ended
from support.plans import random_plan, write_plan
from zbv_worker.host.local_ranks import LocalRanks, python_command

P = 3
LOST = P - 1


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plan(tmp_path_factory.mktemp("plan") / "plan.json", *random_plan(P, 4))


@pytest.mark.parametrize("way", ["returns", "raises", "SIGKILL", "SIGSTOP"])
def test_the_other_ranks_name_the_rank_that_has_left_and_end(plan: Path, tmp_path: Path, way: str) -> None:
    command = python_command("support.leaving_pipeline_rank", str(plan), way)
    with LocalRanks([command] * P, tmp_path / "logs") as ranks:
        ended(ranks, set(range(P)) - {LOST}, time.monotonic())
        for rank in range(P):
            log = ranks.log(rank)
            if rank != LOST:
                assert ranks.processes[rank].returncode == 0, log
                assert f"rank {LOST}" in log, "\n".join(ranks.log(each) for each in range(P))
                assert any(kind in log for kind in ("PeerLost", "ChannelTimeout", "Disagreement")), log
