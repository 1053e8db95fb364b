"""Which global rank does what: positions in the pipeline, and replicas of the whole pipeline.

The pipeline is the outer dimension, as in torchtitan's and Megatron-LM's meshes: the replicas of one position
are neighbours, so that on nodes with several GPUs the gradients' all-reduce stays inside a node.
"""

from __future__ import annotations

from dataclasses import dataclass

from zbv_worker.errors import InvalidRun


@dataclass(frozen=True)
class Layout:
    """``pp_degree`` × ``replicas`` ranks; global rank = pipeline rank · replicas + replica."""

    pp_degree: int
    replicas: int = 1

    @classmethod
    def of_world(cls, world_size: int, replicas: int) -> Layout:
        """The layout of so many ranks; raises :class:`InvalidRun` when they do not divide evenly."""
        if replicas < 1 or world_size % replicas:
            raise InvalidRun(
                f"found {world_size} ranks and {replicas} replicas; the ranks must divide evenly over the "
                f"replicas. Start p × {replicas} ranks, p being the plan's number of ranks."
            )
        return cls(world_size // replicas, replicas)

    @property
    def world_size(self) -> int:
        """All ranks of all replicas."""
        return self.pp_degree * self.replicas

    def global_rank(self, pp_rank: int, replica: int) -> int:
        """The rank of a position of a replica."""
        return pp_rank * self.replicas + replica

    def pp_rank(self, rank: int) -> int:
        """A global rank's position in its pipeline."""
        return rank // self.replicas

    def replica(self, rank: int) -> int:
        """Which pipeline a global rank belongs to."""
        return rank % self.replicas

    def copies_of(self, pp_rank: int) -> tuple[int, ...]:
        """The global ranks that hold the same stages, by replica."""
        return tuple(self.global_rank(pp_rank, replica) for replica in range(self.replicas))
