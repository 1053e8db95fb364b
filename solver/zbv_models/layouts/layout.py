"""Parallel layouts: how a cluster's devices share the work of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from math import gcd, prod
from typing import Literal, get_args

from zbv_models.estimate.device import GroupLink, GroupLinks
from zbv_models.estimate.shapes import Degrees
from zbv_models.layouts.cluster import Cluster

Order = Literal["tp-cp-dp-pp", "tp-cp-pp-dp"]
"""Kinds of groups from neighbouring devices to the farthest.

``tp-cp-dp-pp``: pipeline ranks are farthest apart, and replicas share nodes if they can (the default of
Megatron-LM). ``tp-cp-pp-dp``: a pipeline has neighbouring devices, and replicas are farthest apart
(Megatron-LM with ``--use-tp-pp-dp-mapping``).
"""
ORDERS: tuple[Order, ...] = get_args(Order)
Recompute = Literal["none", "selective", "full", "per-stage"]


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to share a step.

    Attributes
    ----------
    tensor_parallel, context_parallel, data_parallel, pipeline_parallel
        Degrees; their product is the number of devices.
    expert_parallel
        Devices that share the experts of a block, out of all but pipeline ranks.
    microbatch_size
        Sequences per microbatch.
    microbatches
        Per step and replica.
    recompute
        What every stage recomputes; with ``per-stage`` the plan chooses nothing or everything for each.
    recompute_layers
        With ``full``, how many transformer layers of every stage are recomputed, its first ones; None: all.
        Until the search has a cut, ``recompute`` is ``per-stage``.
    recompute_modules
        What ``selective`` repeats; empty: what the search's setting says.
    placement
        How devices are numbered.
    groups
        (pipeline_parallel,) group of nodes of every pipeline rank; empty in a cluster of equal nodes.
    """

    tensor_parallel: int
    context_parallel: int
    expert_parallel: int
    data_parallel: int
    pipeline_parallel: int
    microbatch_size: int
    microbatches: int
    zero_stage: int
    recompute: Recompute
    placement: Order
    groups: tuple[int, ...] = ()
    recompute_layers: int | None = None
    recompute_modules: tuple[str, ...] = ()

    @property
    def group_of(self) -> tuple[int, ...]:
        """(pipeline_parallel,) group of every pipeline rank."""
        return self.groups or (0,) * self.pipeline_parallel

    @property
    def used_groups(self) -> tuple[int, ...]:
        """The groups with pipeline ranks, ascending."""
        return tuple(sorted(set(self.group_of)))

    def in_group(self, group: int) -> Layout:
        """The pipeline ranks of a group by themselves: devices are numbered in every group from 0."""
        if not self.groups:
            return self
        return replace(self, pipeline_parallel=self.groups.count(group), groups=())

    @property
    def devices(self) -> int:
        """Devices of all ranks."""
        return self._of_rank * self.pipeline_parallel

    @property
    def _sizes(self) -> dict[str, int]:
        return {
            "tp": self.tensor_parallel,
            "cp": self.context_parallel,
            "dp": self.data_parallel,
            "pp": self.pipeline_parallel,
        }

    def size(self, kind: str) -> int:
        """Devices of a group of a kind: ``tp``, ``cp``, ``dp`` or ``pp``."""
        return self._sizes[kind]

    def stride(self, kind: str) -> int:
        """Distance of neighbours in groups of a kind: ``tp``, ``cp``, ``dp`` or ``pp``."""
        order, sizes = self.placement.split("-"), self._sizes
        return prod(sizes[inner] for inner in order[: order.index(kind)])

    def degrees(self, cluster: Cluster) -> Degrees:
        """How many devices share what."""
        return Degrees(
            tensor=self.tensor_parallel,
            sequence_parallel=self.tensor_parallel > 1,
            context=self.context_parallel,
            expert=self.expert_parallel,
            expert_in_node=self._experts_in_node(cluster),
            data=self.data_parallel,
            zero_stage=self.zero_stage,
        )

    def links(self, cluster: Cluster) -> GroupLinks:
        """The links of all groups.

        NCCL makes rings that leave a node by different cards, as many as the group has devices there: 24 A100
        on three nodes with four cards of 25 GB/s each reach 96 GB/s in an all-reduce (NVIDIA/nccl-tests,
        issue 119). Keys and values, tokens, and outputs go from one device to another, by that device's card.
        """

        def of(kind: str, overlap: float) -> GroupLink:
            return cluster.link(self.stride(kind), self._sizes[kind], overlap)

        inside = GroupLink(cluster.in_node.bandwidth, cluster.in_node.latency, cluster.expert_overlap)
        across = cluster.between_nodes
        # Devices that share sequences have the same parameters, so they reduce gradients, too.
        near = self._near(cluster, "cp", "dp")
        # Devices with the same experts are as far apart as an expert-parallel group is long.
        experts = self._of_rank // self.expert_parallel
        near_experts = gcd(experts, max(1, self._near(cluster, "tp", "cp", "dp") // self.expert_parallel))
        replicas = self.context_parallel * self.data_parallel
        return GroupLinks(
            tensor=cluster.ring(self._near(cluster, "tp"), self.tensor_parallel, cluster.tensor_overlap),
            context=of("cp", cluster.context_overlap),
            expert=GroupLink(across.bandwidth, across.latency, cluster.expert_overlap),
            expert_in_node=inside,
            data=cluster.ring(near, replicas, cluster.data_overlap),
            expert_data=cluster.ring(near_experts, experts, cluster.data_overlap),
            pipeline=of("pp", 0.0),
        )

    def _near(self, cluster: Cluster, *kinds: str) -> int:
        """Devices that a group of some kinds together has on every node that it uses."""
        found, size = 1, 1
        for number, kind in enumerate(kinds):
            size *= self._sizes[kind]
            following = kinds[number + 1] if number + 1 < len(kinds) else None
            if following is not None and self.stride(following) == self.stride(kind) * self._sizes[kind]:
                continue  # the devices of both are numbered one after another
            stride, on_node = self.stride(kind) * self._sizes[kind] // size, cluster.gpus_per_node
            found *= 1 if on_node % stride else gcd(size, on_node // stride)
            size = 1
        return found

    @property
    def _of_rank(self) -> int:
        """Devices of all replicas of a pipeline rank."""
        return self.tensor_parallel * self.context_parallel * self.data_parallel

    def _experts_in_node(self, cluster: Cluster) -> int:
        """Devices of an expert-parallel group that are on one node: the group takes the nearest ones."""
        near = self.tensor_parallel * self.context_parallel
        if self.placement == "tp-cp-dp-pp":
            near = self._of_rank
        return gcd(self.expert_parallel, gcd(near, cluster.gpus_per_node))


@dataclass(frozen=True)
class Fixed:
    """Parts of a layout that the caller fixes; None leaves a part to the search."""

    tensor_parallel: int | None = None
    context_parallel: int | None = None
    expert_parallel: int | None = None
    data_parallel: int | None = None
    pipeline_parallel: int | None = None
    microbatch_size: int | None = None
    zero_stage: int | None = None
    recompute: Recompute | None = None
    recompute_layers: int | None = None
    placement: Order | None = None

    def given(self) -> Iterator[tuple[str, int | str]]:
        """The fixed parts, by name."""
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None:
                yield each.name, value
