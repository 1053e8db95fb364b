"""The ranks of a run: this process's number and device, and which rank has which part of the pipeline.

Without a device mesh, the pipeline is the outer dimension, as in torchtitan's and Megatron-LM's meshes: the
replicas of one position are adjacent, so that on nodes with several GPUs the gradients' all-reduce stays
inside a node. With a mesh of the user, the mesh decides.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from zbv_worker.errors import InvalidRun
from zbv_worker.host.process import say
from zbv_worker.transport import nccl_environment

Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True)
class World:
    """This process's place among the ranks."""

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

    @classmethod
    def current(cls) -> World:
        """The world that this process is in.

        In this order: the world of ``torch.distributed`` if the user has initialised it, the one of
        torchrun's environment variables, or one rank alone.
        """
        if dist.is_initialized():
            rank = dist.get_rank()
            local = dist.get_node_local_rank(fallback_rank=rank % max(1, torch.cuda.device_count()))
            return cls(rank, dist.get_world_size(), local)
        if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
            return cls.from_environment()
        return cls(0, 1, 0)


@dataclass(frozen=True)
class Layout:
    """Which global rank has which position of which pipeline.

    The ranks form ``pp_degree`` × ``replicas`` × ``inner`` places. Ranks that differ only in their position
    form a *column*, one complete pipeline. Replicas train on different data and sum their gradients. The
    inner ranks of a replica compute the same stages together, each its own part (tensor, context and expert
    parallelism), and follow the same plan in lock-step.

    Parameters
    ----------
    order
        The global ranks by position, replica and inner index, the last one fastest; None for 0, 1, 2, …
    """

    pp_degree: int
    replicas: int = 1
    inner: int = 1
    order: tuple[int, ...] | None = None

    @classmethod
    def of_world(cls, world_size: int, replicas: int) -> Layout:
        """The layout of ``world_size`` ranks; raises :class:`InvalidRun` if they do not divide evenly."""
        if replicas < 1 or world_size % replicas:
            raise InvalidRun(
                f"found {world_size} ranks and {replicas} replicas; the number of ranks must be a multiple "
                f"of the replicas. Start p × {replicas} ranks, where p is the plan's number of ranks."
            )
        return cls(world_size // replicas, replicas)

    @classmethod
    def of_mesh(cls, names: Sequence[str] | None, ranks: Tensor, world_size: int) -> Layout:
        """The layout of a device mesh.

        Parameters
        ----------
        names
            The names of the mesh's dimensions (``mesh.mesh_dim_names``). ``pp`` is the pipeline; names that
            begin with ``dp`` are replicas; all others belong to the model's own parallelism.
        ranks
            The global ranks, with one dimension per name (``mesh.mesh``).

        Raises
        ------
        InvalidRun
            If there is no dimension ``pp``, or the mesh does not contain every rank once.
        """
        names = names or ()
        if "pp" not in names:
            raise InvalidRun(
                f"found a mesh with dimensions {tuple(names)}; one must be named 'pp'. Create it with "
                f"init_device_mesh(device, (p, …), mesh_dim_names=('pp', …))."
            )
        if sorted(ranks.flatten().tolist()) != list(range(world_size)):
            raise InvalidRun(
                f"found a mesh of the ranks {ranks.flatten().tolist()}; it must contain every one of the "
                f"{world_size} ranks once. Pass the whole mesh, not a part of it."
            )
        data = [at for at, name in enumerate(names) if name.startswith("dp")]
        rest = [at for at, name in enumerate(names) if name != "pp" and at not in data]
        ordered = ranks.permute(names.index("pp"), *data, *rest)
        replicas = math.prod(ranks.shape[at] for at in data)
        inner = math.prod(ranks.shape[at] for at in rest)
        return cls(len(ordered), replicas, inner, tuple(ordered.flatten().tolist()))

    @property
    def world_size(self) -> int:
        """The number of ranks in all columns."""
        return self.pp_degree * self.columns

    @property
    def columns(self) -> int:
        """The number of complete pipelines."""
        return self.replicas * self.inner

    def global_rank(self, pp_rank: int, column: int) -> int:
        """The global rank of a position in a column."""
        place = pp_rank * self.columns + column
        return place if self.order is None else self.order[place]

    def pp_rank(self, rank: int) -> int:
        """A global rank's position in its pipeline."""
        return self._place(rank) // self.columns

    def column(self, rank: int) -> int:
        """The index of a global rank's pipeline. Column 0 belongs to replica 0."""
        return self._place(rank) % self.columns

    def replica(self, rank: int) -> int:
        """The index of the replica that a global rank belongs to."""
        return self.column(rank) // self.inner

    def copies_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that compute the same as a global rank, for other data; by replica."""
        pp_rank, inner = self.pp_rank(rank), self.column(rank) % self.inner
        return tuple(self.global_rank(pp_rank, at * self.inner + inner) for at in range(self.replicas))

    def sets_of_copies(self) -> list[tuple[int, ...]]:
        """All different :meth:`copies_of`, in the same order on every rank."""
        return list(dict.fromkeys(map(self.copies_of, range(self.world_size))))

    def _place(self, rank: int) -> int:
        return rank if self.order is None else self._places[rank]

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.order or ())}


def default_backend(local_ranks: int) -> Backend:
    """NCCL if this host has a GPU for each of its ranks, gloo otherwise; says why on the first rank."""
    # Counting devices does not start CUDA, which must see the variables that select_device sets.
    gpus = torch.cuda.device_count() if dist.is_available() and dist.is_nccl_available() else 0
    backend: Backend = "nccl" if gpus >= local_ranks else "gloo"
    if os.environ.get("LOCAL_RANK", "0") == "0":
        found = "no GPU" if gpus == 0 else f"{gpus} GPU{'s' if gpus > 1 else ''} for {local_ranks} ranks"
        device = "GPUs" if backend == "nccl" else "CPUs"
        say(f"found {found}: computing on {device} with {backend}; --backend changes this")
    return backend


def select_device(backend: Backend, local_rank: int) -> torch.device:
    """The device of a rank: CPU for gloo, its own GPU for NCCL; raises :class:`InvalidRun`."""
    if backend == "gloo":
        return torch.device("cpu")
    has_cuda_started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's own
    for line in nccl_environment.apply(os.environ, has_cuda_started=has_cuda_started):
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
    torch.empty(1, device="cpu", pin_memory=device.type == "cuda")
    torch.cuda.synchronize(device)
