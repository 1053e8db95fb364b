"""What one warm step of a pipeline walks through: ``python -m support.walked_rank``, on two ranks over gloo.

Prints the number of functions and files of the worker that rank 0 enters, apart from its thread for signs of
life; with an argument, also which.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any

import torch
import zbv_solver
import zbv_worker as zbv
from torch import nn
from zbv_worker.host.local_ranks import LocalRanks, python_command

PACKAGE = os.path.dirname(zbv.__file__)
WARM = 3
PROBLEM = {
    "pp_degree": 2,
    "microbatches": 4,
    "placement": "v",
    "costs": {"forward": 1, "backward_input": 1, "backward_weight": 1},
}


class Walk:
    """Counts calls of the worker's functions, in this thread and in those that start later."""

    def __init__(self) -> None:
        self.calls = Counter[CodeType]()
        self.is_on = False

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not self.is_on or threading.current_thread().name == "zbv-liveness":
            return
        code = frame.f_code
        # Comprehensions are parts of the function around them.
        if not code.co_name.endswith(("comp>", "genexpr>")) and code.co_filename.startswith(PACKAGE):
            self.calls[code] += 1

    @property
    def files(self) -> list[str]:
        return sorted({os.path.relpath(code.co_filename, PACKAGE) for code in self.calls})


def main(*, is_long: bool) -> None:
    torch.set_num_threads(1)
    walk = Walk()
    threading.setprofile(walk.note)
    sys.setprofile(walk.note)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8)]
    x = torch.ones(8, 8)
    with zbv.Pipeline(zbv_solver.plan(zbv_solver.parse(PROBLEM)), layers, nn.functional.mse_loss) as pipe:
        for step in range(WARM + 1):
            walk.is_on = step == WARM
            pipe.step(x, x)
            walk.is_on = False
    if int(os.environ["RANK"]) == 0:
        calls = walk.calls.total()
        sys.stdout.write(f"{len(walk.calls)} functions, {len(walk.files)} files, {calls} calls\n")
        if is_long:
            for name in walk.files:
                named = [
                    f"{code.co_qualname} {n}"
                    for code, n in walk.calls.items()
                    if code.co_filename.endswith(f"/{name}")
                ]
                sys.stdout.write(f"{name}: {', '.join(named)}\n")


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(is_long=len(sys.argv) > 1)
    else:
        command = python_command("support.walked_rank", *sys.argv[1:])
        with TemporaryDirectory() as logs, LocalRanks([command] * 2, Path(logs)) as ranks:
            ranks.wait(timeout=240)
            sys.stdout.write(ranks.log(0))
