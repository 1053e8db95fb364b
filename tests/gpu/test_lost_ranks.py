"""A rank of a run is lost: the others abort kernels that wait forever, name it, and end in time."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path

import pytest
from support.failing_ranks import TIMEOUT, ended, started, until_step
from support.on_devices import Devices

log = logging.getLogger(__name__)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_rank_is_named_by_every_other_rank(
    devices: Devices, tmp_path: Path, sign: signal.Signals
) -> None:
    """Without a bounded end, an agent cannot restart the run. ``--log-cli-level info`` shows the seconds."""
    lost = devices.ranks // 2
    others = {*range(devices.ranks)} - {lost}
    with started(tmp_path, devices.ranks, devices.backend, stage=lost, what="pause") as ranks:
        until_step(ranks, 3)
        os.kill(ranks.processes[lost].pid, sign)
        seconds = ended(ranks, others, time.monotonic())
        if sign == signal.SIGSTOP:
            os.kill(ranks.processes[lost].pid, signal.SIGKILL)
        for rank in others:
            assert f"rank {lost} lost: it gives no sign of life" in ranks.log(rank), ranks.log(rank)
            assert "Traceback" not in ranks.log(rank), ranks.log(rank)
            assert ranks.processes[rank].returncode == 1, ranks.log(rank)
    log.info("rank %d got %s: others ended after %.1f s (timeout %g s)", lost, sign.name, seconds, TIMEOUT)
