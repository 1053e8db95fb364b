"""A rank whose pipeline is left in a certain way: ``python -m support.leaving_pipeline_rank PLAN WAY``.

The last rank leaves after its second step. The others train on until they get an error, which they print.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
import zbv_worker as zbv
from torch import nn


def leave(way: str, pipe: zbv.Pipeline) -> None:
    if way == "returns":
        pipe.close()
    elif way == "raises":
        raise ValueError("the user's own error")
    else:
        os.kill(os.getpid(), signal.Signals[way])


def main(plan: str, way: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    x = torch.randn(8, 4)
    layers = [nn.Linear(4, 4) for _ in range(2 * ranks)]
    timeout = 10.0 if way == "SIGSTOP" else 60.0  # only a stopped rank is noticed by a timeout
    pipe = zbv.Pipeline(plan, layers, nn.functional.mse_loss, timeout=timeout, startup_timeout=60.0)
    try:
        for step in range(1_000_000):
            pipe.step(x, x)
            if rank == ranks - 1 and step == 1:
                leave(way, pipe)
                return
    except zbv.WorkerError as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
