"""The example of a tensor-parallel pipeline trains, and both processes of a rank know the same loss."""

from __future__ import annotations

import re
from pathlib import Path

from support.paths import TESTS
from zbv_worker.host.local_ranks import LocalRanks, python_command

EXAMPLE = TESTS.parent / "examples" / "tensor_parallel.py"


def test_the_example_trains(tmp_path: Path) -> None:
    command = python_command("support.run_script", str(EXAMPLE))
    with LocalRanks([command] * 4, tmp_path, {"PYTHONPATH": str(TESTS)}) as ranks:
        ranks.wait(timeout=240)
        logs = [re.findall(r"^loss (.*)$", ranks.log(rank), re.MULTILINE) for rank in range(4)]
    assert logs[0] == logs[1]  # the processes of the V's first rank, which has the loss
    assert logs[2] == logs[3] == []
    assert len(logs[0]) == 12
    assert float(logs[0][-1]) < float(logs[0][0]) / 2
