"""Parallel layouts: how a cluster's devices share the work of a step, and all ways to do so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache
from itertools import chain, combinations, permutations, product
from math import factorial, gcd, isqrt, prod
from typing import Literal, get_args

from zbv_solver.problem.numeric import MAX_PP_DEGREE

from zbv_models.estimate.device import GroupLink, GroupLinks
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.model_layers import count_layers, expert_degree
from zbv_models.estimate.model_rules import fits
from zbv_models.estimate.shapes import Degrees
from zbv_models.layouts.cluster import AnyCluster, Cluster

Order = Literal["tp-cp-dp-pp", "tp-cp-pp-dp"]
"""Kinds of groups from neighbouring devices to the farthest.

``tp-cp-dp-pp``: pipeline ranks are farthest apart, and replicas share nodes if they can (the default of
Megatron-LM). ``tp-cp-pp-dp``: a pipeline has neighbouring devices, and replicas are farthest apart
(Megatron-LM with ``--use-tp-pp-dp-mapping``).
"""
ORDERS: tuple[Order, ...] = get_args(Order)
Recompute = Literal["none", "selective", "full", "per-stage"]
PARTS = (
    *("tensor_parallel", "context_parallel", "expert_parallel", "data_parallel", "pipeline_parallel"),
    *("microbatch_size", "zero_stage", "placement"),
)
"""What tells layouts apart."""
ZERO_STAGES = (0, 1, 2, 3)
MOST_LAYOUTS = 2_000_000
"""Most layouts of a search."""
MOST_LISTED = 400_000
"""Most layouts of a search that holds every single one: for executors, and for points of all layouts."""
MOST_ARRANGEMENTS = 24
"""Most orders of the groups along the pipeline for which all orders are enumerated."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to share a step."""

    tensor_parallel: int
    context_parallel: int
    expert_parallel: int
    """Devices that share the experts of a block, out of all but pipeline ranks."""
    data_parallel: int
    pipeline_parallel: int
    """The product with the degrees of tensors, contexts and data is the number of devices."""
    microbatch_size: int
    """Sequences."""
    microbatches: int
    """Per step and replica."""
    zero_stage: int
    recompute: Recompute
    """What every stage recomputes; with ``per-stage`` the plan chooses nothing or everything for each."""
    placement: Order
    """How devices are numbered."""
    groups: tuple[int, ...] = ()
    """(pipeline_parallel,) group of nodes of every pipeline rank; empty in a cluster of equal nodes."""
    recompute_layers: int | None = None
    """With ``full``, how many transformer layers of every stage are recomputed, its first ones; None: all.
    Until the search has a cut, ``recompute`` is ``per-stage``."""
    recompute_modules: tuple[str, ...] = ()
    """What ``selective`` repeats; empty: what the search's setting says."""

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
    def sizes(self) -> dict[str, int]:
        """Devices of a group of every kind."""
        return {
            "tp": self.tensor_parallel,
            "cp": self.context_parallel,
            "dp": self.data_parallel,
            "pp": self.pipeline_parallel,
        }

    def stride(self, kind: str) -> int:
        """Distance of neighbours in groups of a kind: ``tp``, ``cp``, ``dp`` or ``pp``."""
        order, sizes = self.placement.split("-"), self.sizes
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
            return cluster.link(self.stride(kind), self.sizes[kind], overlap)

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
            size *= self.sizes[kind]
            following = kinds[number + 1] if number + 1 < len(kinds) else None
            if following is not None and self.stride(following) == self.stride(kind) * self.sizes[kind]:
                continue  # the devices of both are numbered one after another
            stride, on_node = self.stride(kind) * self.sizes[kind] // size, cluster.gpus_per_node
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


@dataclass(frozen=True, slots=True)
class LayoutFamily:
    """Layouts that differ only in parts that no microbatch's work depends on.

    A large cluster has a million layouts, and a search looks at few of them one by one.
    """

    first: Layout
    """The first of them, which has all the parts that they share."""
    zero_stages: tuple[int, ...]
    """What follows differs: any combination is a layout."""
    orders: tuple[Order, ...]
    groups: tuple[tuple[int, ...], ...]
    kinds: tuple[Recompute, ...]
    """Of recomputation."""
    modules: tuple[str, ...]
    """What those with selective recomputation repeat."""

    def __len__(self) -> int:
        return len(self.zero_stages) * len(self.orders) * len(self.groups) * len(self.kinds)

    def __iter__(self) -> Iterator[Layout]:
        for stage, order, groups, kind in product(self.zero_stages, self.orders, self.groups, self.kinds):
            yield replace(
                self.first,
                zero_stage=stage,
                placement=order,
                groups=groups,
                recompute=kind,
                recompute_modules=self.modules if kind == "selective" else (),
            )


def enumerate_layouts(
    model: Transformer,
    cluster: AnyCluster,
    global_batch: int,
    fixed: Fixed,
    modules: tuple[str, ...] = (),
) -> Iterator[LayoutFamily]:
    """Every layout whose degrees divide the cluster, the model and the global batch, in families.

    Two layouts that cost the same are one: without replicas there is nothing for ZeRO to share, and the
    order of groups matters only with several replicas and several pipeline ranks in a group of nodes.

    A cluster of several groups of nodes has the layouts of every set of its groups that use all of their
    devices. A pipeline rank has the same number of devices everywhere, and all of them are in one group.

    ``none`` and ``full`` are plans of ``per-stage``. Selective recomputation of ``modules`` is another
    choice, if there are any.
    """
    kinds: tuple[Recompute, ...] = ("per-stage", "selective") if modules else ("per-stage",)
    if fixed.recompute_layers is not None:
        kinds = ("per-stage",)
    elif fixed.recompute is not None:
        kinds = (fixed.recompute,)
    groups = range(len(cluster.groups))
    # All sets of groups, the largest first.
    for used in chain.from_iterable(combinations(groups, len(groups) - size) for size in groups):
        sizes = [cluster.groups[group].devices for group in used]
        for degrees, pipeline in _degrees(model, sum(sizes), global_batch, fixed):
            if any(size * pipeline % sum(sizes) for size in sizes):
                continue
            ranks = [size * pipeline // sum(sizes) for size in sizes]
            arranged = arrangements(used, tuple(ranks)) if len(cluster.groups) > 1 else ((),)
            stages = _zero_stages(degrees.replicas, fixed)
            orders = _orders(degrees.data, max(ranks), fixed)
            for size in _divisors(global_batch // degrees.data, fixed.microbatch_size):
                first = Layout(
                    degrees.tensor,
                    degrees.context,
                    degrees.expert,
                    degrees.data,
                    pipeline,
                    size,
                    global_batch // degrees.data // size,
                    stages[0],
                    kinds[0],
                    orders[0],
                    arranged[0],
                    fixed.recompute_layers,
                    modules if kinds[0] == "selective" else (),
                )
                yield LayoutFamily(first, stages, orders, arranged, kinds, modules)


@cache
def arrangements(groups: tuple[int, ...], ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The group of every pipeline rank, in every order, for the number of ranks of each group.

    If there are more than `MOST_ARRANGEMENTS`, the ranks of a group are neighbours, and the groups have every
    order.
    """
    each = [factorial(count) for count in ranks]
    if factorial(sum(ranks)) // prod(each) <= MOST_ARRANGEMENTS:
        return tuple(_orders_of(dict(zip(groups, ranks, strict=True))))
    blocks = [(group,) * count for group, count in zip(groups, ranks, strict=True)]
    return tuple(tuple(chain(*order)) for order in permutations(blocks))


def _orders_of(left: dict[int, int]) -> Iterator[tuple[int, ...]]:
    """The different orders of items, given by the number of each kind."""
    if not any(left.values()):
        yield ()
    for kind, count in left.items():
        if count:
            for rest in _orders_of({**left, kind: count - 1}):
                yield (kind, *rest)


def _degrees(
    model: Transformer, devices: int, global_batch: int, fixed: Fixed
) -> Iterator[tuple[Degrees, int]]:
    """Degrees that fit the model, and pipeline ranks."""
    ranks = min(MAX_PP_DEGREE, count_layers(model))
    experts = expert_degree(model)
    for tensor in _divisors(devices, fixed.tensor_parallel):
        if not fits(model, Degrees(tensor, tensor > 1)):
            continue
        for context in _divisors(devices // tensor, fixed.context_parallel):
            if not fits(model, Degrees(tensor, tensor > 1, context)):
                continue
            for pipeline in _divisors(devices // tensor // context, fixed.pipeline_parallel):
                data = devices // tensor // context // pipeline
                if pipeline > ranks or fixed.data_parallel not in (None, data) or global_batch % data:
                    continue
                for expert in _divisors(experts, fixed.expert_parallel):
                    if tensor * context * data % expert == 0:
                        yield Degrees(tensor, tensor > 1, context, expert=expert, data=data), pipeline


def _zero_stages(replicas: int, fixed: Fixed) -> tuple[int, ...]:
    if fixed.zero_stage is not None:
        return (fixed.zero_stage,)
    return ZERO_STAGES if replicas > 1 else ZERO_STAGES[:1]


def _orders(data: int, pipeline: int, fixed: Fixed) -> tuple[Order, ...]:
    if fixed.placement is not None:
        return (fixed.placement,)
    return ORDERS if data > 1 and pipeline > 1 else ORDERS[:1]


def _divisors(number: int, fixed: int | None = None) -> tuple[int, ...]:
    """The divisors in ascending order, or the fixed one if it divides."""
    if fixed is not None:
        return (fixed,) if number % fixed == 0 else ()
    return _all_divisors(number)


@lru_cache(maxsize=4096)
def _all_divisors(number: int) -> tuple[int, ...]:
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return tuple(sorted({*small, *(number // divisor for divisor in small)}))
