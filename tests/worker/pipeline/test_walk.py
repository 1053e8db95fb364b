"""A step is a walk that a reader can follow: it must not grow by functions and files that earn nothing."""

from __future__ import annotations

import re
from pathlib import Path

from zbv_worker.host.local_ranks import LocalRanks, python_command

FUNCTIONS, FILES = 110, 20
"""One more than most steps: the thread that releases what was sent may run within a step, or after it."""


def test_a_warm_step_passes_no_more_functions_and_files_than_before(tmp_path: Path) -> None:
    """``python -m support.walked_rank long`` (in the folder ``tests``) lists them."""
    with LocalRanks([python_command("support.walked_rank")] * 2, tmp_path) as ranks:
        ranks.wait(timeout=240)
        found = re.search(r"(\d+) functions, (\d+) files", ranks.log(0))
    assert found is not None
    assert int(found[1]) <= FUNCTIONS
    assert int(found[2]) <= FILES
