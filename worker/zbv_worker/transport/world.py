"""This process among the ranks of a run: its number, and the device that it computes on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch

from zbv_worker.errors import InvalidRun

Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True)
class World:
    """This process's place among the ranks, from torchrun's environment variables."""

    rank: int
    world_size: int
    local_rank: int

    @classmethod
    def from_environment(cls) -> World:
        """Read RANK, WORLD_SIZE and LOCAL_RANK; raises :class:`InvalidRun` if one is absent or invalid."""
        values = {}
        for name, default in (("RANK", None), ("WORLD_SIZE", None), ("LOCAL_RANK", os.environ.get("RANK"))):
            text = os.environ.get(name, default)
            if text is None or not text.isdigit():
                raise InvalidRun(
                    f"environment variable {name}: found {text!r}; must be a number. Start the ranks with "
                    f"`torchrun --nproc-per-node P --no-python zbv-worker run …`, or set RANK, WORLD_SIZE, "
                    f"MASTER_ADDR and MASTER_PORT."
                )
            values[name.lower()] = int(text)
        return cls(**values)


def select_device(backend: Backend, local_rank: int) -> torch.device:
    """The device of a rank: CPU for gloo, its own GPU for NCCL; raises :class:`InvalidRun`."""
    if backend == "gloo":
        return torch.device("cpu")
    # Each channel uses a stream, and a middle rank of a V has eight besides its compute stream. Streams that
    # share a hardware queue (8 by default) can block each other, here possibly forever. CUDA reads this
    # variable when it starts.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank >= count:
        raise InvalidRun(
            f"--backend nccl: local rank {local_rank} needs its own GPU, but found {count}. Start "
            f"fewer ranks on this node, or use --backend gloo."
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
