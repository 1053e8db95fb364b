"""Maps global ranks to pipeline positions and replicas.

The pipeline is the outer dimension, as in torchtitan's and Megatron-LM's meshes: the replicas of one position
are adjacent, so that on nodes with several GPUs the gradients' all-reduce stays inside a node.
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
