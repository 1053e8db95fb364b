"""The ranks of a run: this process's number and device, and which rank has which part of the pipeline.

The pipeline is the outer dimension, as in torchtitan's and Megatron-LM's meshes: the replicas of one position
are adjacent, so that on nodes with several GPUs the gradients' all-reduce stays inside a node.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch

from zbv_worker.errors import InvalidRun
from zbv_worker.transport import nccl_environment
from zbv_worker.transport.rendezvous import say

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


@dataclass(frozen=True)
class Layout:
    """``pp_degree`` × ``replicas`` ranks; global rank = pipeline rank · replicas + replica."""

    pp_degree: int
    replicas: int = 1

    @classmethod
    def of_world(cls, world_size: int, replicas: int) -> Layout:
        """The layout of ``world_size`` ranks; raises :class:`InvalidRun` if they do not divide evenly."""
        if replicas < 1 or world_size % replicas:
            raise InvalidRun(
                f"found {world_size} ranks and {replicas} replicas; the number of ranks must be a multiple "
                f"of the replicas. Start p × {replicas} ranks, where p is the plan's number of ranks."
            )
        return cls(world_size // replicas, replicas)

    @property
    def world_size(self) -> int:
        """The number of ranks in all replicas."""
        return self.pp_degree * self.replicas

    def global_rank(self, pp_rank: int, replica: int) -> int:
        """The global rank of a position in a replica."""
        return pp_rank * self.replicas + replica

    def pp_rank(self, rank: int) -> int:
        """A global rank's position in its pipeline."""
        return rank // self.replicas

    def replica(self, rank: int) -> int:
        """The index of the pipeline that a global rank belongs to."""
        return rank % self.replicas

    def copies_of(self, pp_rank: int) -> tuple[int, ...]:
        """The global ranks that hold the stages of one position, by replica."""
        return tuple(self.global_rank(pp_rank, replica) for replica in range(self.replicas))


def select_device(backend: Backend, local_rank: int) -> torch.device:
    """The device of a rank: CPU for gloo, its own GPU for NCCL; raises :class:`InvalidRun`."""
    if backend == "gloo":
        return torch.device("cpu")
    for line in nccl_environment.apply(os.environ):  # before CUDA starts
        say(line)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank >= count:
        raise InvalidRun(
            f"--backend nccl: local rank {local_rank} needs its own GPU, but found {count}. Start "
            f"fewer ranks on this node, or use --backend gloo."
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    create_early(device)
    return device


def create_early(device: torch.device) -> None:
    """Make CUDA create now what it otherwise creates at first use: its libraries' handles, and pinned memory.

    Creating them may wait for the whole device. Within a step, that includes receives that wait for other
    ranks. The libraries have handles for each thread; the backward runs on a thread of autograd.
    """
    matrix = torch.ones(8, 8, device=device, requires_grad=True)
    (matrix @ matrix).sum().backward()  # type: ignore[no-untyped-call]  # torch's own
    torch.empty(1, pin_memory=device.type == "cuda")
    torch.cuda.synchronize(device)
