"""The demonstration's last part: a training script on two ranks, which resumes from its checkpoint."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from zbv_worker.host.local_ranks import LocalRanks

RANKS = 2
STOPS = (40, 80)
"""The script's numbers of steps: it ends after the first, and goes on to the second."""
_TIMEOUT = 300.0
_SHOWN = ("zbv:", "step ", "resumed ", "loss ")


def run_example(script: Path, folder: Path, on_poll: Callable[[], None] | None = None) -> list[str]:
    """Run a script that takes ``--steps`` and ``--checkpoints``; returns the lines to show.

    Raises
    ------
    LaunchError
        If a rank fails, or they do not end in time.
    """
    saved = folder / "checkpoints"
    shutil.rmtree(folder, ignore_errors=True)
    shown = []
    for steps in STOPS:
        arguments = ["--steps", str(steps), "--checkpoints", str(saved)]
        command = [sys.executable, str(script), *arguments]
        shown.append(f"{script} {' '.join(arguments)}")
        with LocalRanks([command] * RANKS, folder / f"until-{steps}") as ranks:
            ranks.wait(_TIMEOUT, on_poll)
            lines = [line for rank in range(RANKS) for line in ranks.log(rank).splitlines()]
        found = [line for line in lines if line.startswith(_SHOWN)]
        shown += [f"  {line}" for line in dict.fromkeys(found)]  # once, although every rank says it
    return shown
