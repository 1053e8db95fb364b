"""Four real ranks over gloo of which one is lost: the others name it and end, each by itself, and in time.

With ``--log-cli-level info``, pytest shows how long that took.
"""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path

import pytest
from gpu.test_lost_ranks import test_a_killed_or_stopped_rank_is_named_by_every_other_rank
from support.failing_ranks import TIMEOUT, ended, started
from support.on_devices import Devices

__all__ = ["test_a_killed_or_stopped_rank_is_named_by_every_other_rank"]
log = logging.getLogger(__name__)

P = 4
LOST = 2
"""The rank with the stages 2 and 5 of the V; ranks 0 and 3 are not its neighbours' only ones."""


@pytest.fixture
def devices() -> Devices:
    """Ranks on CPUs; the GPU test loses rank 2."""
    return Devices("cpu", "gloo", P)


def test_an_interrupted_rank_says_so_without_a_traceback_and_the_others_end(tmp_path: Path) -> None:
    with started(tmp_path, P, stage=LOST, what="interrupt", after=20) as ranks:
        ended(ranks, set(range(P)), time.monotonic())
        assert f"zbv-worker: rank {LOST} was interrupted." in ranks.log(LOST)
        assert "Traceback" not in ranks.log(LOST)
        assert ranks.processes[LOST].returncode == 130
        for rank in {0, 1, 3}:
            assert f"rank {LOST} lost: rank {LOST} was interrupted" in ranks.log(rank), ranks.log(rank)


def test_a_rank_that_hangs_in_an_action_is_named_and_ends_as_well(tmp_path: Path) -> None:
    with started(tmp_path, P, stage=LOST, what="hang", after=20) as ranks:
        seconds = ended(ranks, set(range(P)), time.monotonic())
        said = rf"rank {LOST} lost: it is alive, but does not get beyond step \d+, {LOST}F\d"
        for rank in {0, 1, 3}:
            assert re.search(said, ranks.log(rank)), ranks.log(rank)
        assert f"rank {LOST}, step" in ranks.log(LOST)
        assert "the other ranks gave this rank up" in ranks.log(LOST)
    log.info(
        "%s",
        f"rank {LOST} hung: all ranks ended within {seconds:.1f} s of their start (timeout {TIMEOUT:g} s)",
    )
