"""A layout as a problem for the planner, and bounds of its step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from zbv_solver.kernels.arrays import FloatArray
from zbv_solver.partition.cut_tables import CutTables, speeds_of
from zbv_solver.partition.floors import least_worst_load
from zbv_solver.partition.least_memory import surely_lacking
from zbv_solver.problem.layer import Model
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.problem import Units

from zbv_models.estimate.device import GroupLink, GroupLinks
from zbv_models.estimate.layers import LayerEstimate, ModelEstimate, Running, Training
from zbv_models.estimate.shapes import Degrees
from zbv_models.estimate.transformer import Transformer
from zbv_models.layouts.cluster import AnyCluster, Cluster, transfer
from zbv_models.layouts.executor_memory import STATES
from zbv_models.layouts.layer_costs import EVERYWHERE, least_work_of, problem_layer, recomputed, row_of
from zbv_models.layouts.layout import Layout
from zbv_models.layouts.measured_layers import LayerConditions, Measured, Origins
from zbv_models.layouts.recomputed_modules import OP, Modules

SECONDS = 1e-6
"""In a microsecond."""
UNITS = Units("us", "bytes")
KINDS = ("tp", "cp", "dp", "pp")


class SourcedCosts(NamedTuple):
    """An estimate, and where the costs of every layer come from; no origins if all are estimated."""

    estimate: ModelEstimate
    origins: tuple[Origins, ...] = ()


@dataclass(frozen=True)
class Setting:
    """What all layouts of a search have in common.

    Attributes
    ----------
    measured
        What profiles measured, which replaces estimates.
    has_loops
        Whether an executor chooses the placement: stages in a loop.
    module_sets
        What executors with selective recomputation of modules may repeat; torchtitan has ``op`` instead.
    """

    model: Transformer
    training: Training
    cluster: AnyCluster
    measured: Measured | None = None
    has_loops: bool = False
    module_sets: tuple[Modules, ...] = ()

    def __hash__(self) -> int:
        return self._hash  # caches of costs ask for it for every layout

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, each.name) for each in fields(self)))

    def is_v(self, ranks: int) -> bool:
        """Whether the placement is V: with a shared table, if there are enough layers, it is held once."""
        if self.has_loops and ranks > 1:
            return False
        return self.model.tied and 2 * ranks <= self.model.n_layers

    def modules_of(self, executor: str) -> tuple[Modules, ...]:
        """What an executor's selective recomputation may repeat."""
        return (OP,) if executor == "torchtitan" else self.module_sets

    def of_executor(self, executor: str) -> Setting:
        """The same with what a device holds under an executor."""
        states = STATES[executor]
        training = replace(
            self.training,
            account=states.account,
            fused_gradients=self.training.fused_gradients and not states.is_autograd,
            keeps_gathered=states.is_autograd,
        )
        return replace(self, training=training)

    def estimate(self, at: LayerConditions) -> SourcedCosts:
        """Layers under these conditions, with measured costs where a profile has them."""
        found = at.estimate()
        return (
            SourcedCosts(found) if self.measured is None else SourcedCosts(*self.measured.applied(found, at))
        )

    def links(self, layout: Layout, group: int = 0) -> tuple[GroupLinks, float]:
        """The links on a group of nodes, measured ones where a profile has them, and a latency once per step.

        Buckets join the gradients of layers, so the latency of measured all-reduces counts once.
        """
        nodes, measured = self.cluster.groups[group], self.measured
        links = layout.links(nodes)
        if measured is None:
            return links, 0.0
        is_near = {kind: nodes.is_in_node(layout.stride(kind), layout.size(kind)) for kind in KINDS}
        pipeline = measured.pipeline_link() if is_near["pp"] else None
        replicas = layout.data_parallel * layout.context_parallel
        data = measured.data_link(replicas, layout.zero_stage) if is_near["cp"] and is_near["dp"] else None
        latency = 0.0
        if data is not None:
            latency = data.latency if replicas > 1 else 0.0
            data = GroupLink(data.bandwidth, 0.0, links.data.overlap)
            links = replace(links, data=data, expert_data=data)
        return replace(links, pipeline=pipeline or links.pipeline), latency

    def least_work(self, layout: Layout) -> float:
        """Lower bound of the step in seconds: compute and the fastest exchanges, none between replicas.

        Lemma 56 of bounds/PROOFS.md.
        """
        sizes = layout.tensor_parallel, layout.context_parallel, layout.expert_parallel
        work, speeds = _least_work_of_all(self, layout.used_groups, *sizes, layout.microbatch_size)
        speed = sum(map(speeds.__getitem__, layout.group_of)) if layout.groups else layout.pipeline_parallel
        return work * layout.microbatches / speed * SECONDS


@dataclass(frozen=True, eq=False)
class EstimatedLayout:
    """A layout with the estimate of its layers.

    A step takes the span of the pipeline and what the busiest rank does once per step: reduce gradients,
    update parameters and gather them.

    Bounds with ranks of several groups of nodes count every rank by the speed of its group: Lemma 56 of
    bounds/PROOFS.md.

    Attributes
    ----------
    estimate, others
        The layers on the first of the groups that the layout uses, and on its other groups.
    origins
        Where the costs of every layer come from; empty if all are estimated.
    """

    layout: Layout
    estimate: ModelEstimate
    setting: Setting
    others: tuple[ModelEstimate, ...] = ()
    origins: tuple[Origins, ...] = ()

    @classmethod
    def of(cls, layout: Layout, setting: Setting) -> EstimatedLayout:
        """Estimate the layers under a layout."""
        of_setting = _with_both(setting, setting.is_v(layout.pipeline_parallel), layout.recompute_modules)
        # A search has layouts that differ only in their recomputation in succession.
        shared = replace(layout, recompute="per-stage", recompute_layers=None, recompute_modules=())
        if not layout.groups:
            costs = _known_costs(of_setting, shared, 0, None)
            return cls(layout, costs.estimate, setting, (), costs.origins)
        # The ranks of a group cost the same wherever they are in the pipeline, except for what both ends sum.
        ends = _link_between(layout, setting.cluster, 0, layout.pipeline_parallel - 1)
        estimate, *others = (
            _known_costs(of_setting, shared.in_group(group), group, ends).estimate
            for group in layout.used_groups
        )
        return cls(layout, estimate, setting, tuple(others))

    @cached_property
    def links(self) -> tuple[GroupLinks, float]:
        """The links of all groups, and microseconds once per step for the latency of the replicas' link."""
        return self.setting.links(self.layout)

    @property
    def latency(self) -> float:
        """Microseconds once per step, of the replicas' exchanges."""
        return 0.0 if self.setting.measured is None else self.links[1]

    @cached_property
    def room(self) -> float:
        """Bytes of a device of every rank together for layers."""
        groups = self.setting.cluster.groups
        counts = {group: self.layout.group_of.count(group) for group in self.layout.used_groups}
        return sum((groups[each].memory - groups[each].reserve) * count for each, count in counts.items())

    @cached_property
    def layers(self) -> tuple[tuple[LayerEstimate, ...], ...]:
        """Every layer on each of the groups in use."""
        return tuple(zip(*(each.layers for each in (self.estimate, *self.others)), strict=True))

    @cached_property
    def kind_of(self) -> tuple[int, ...]:
        """Index of every rank's group in those in use."""
        return tuple(map(self.layout.used_groups.index, self.layout.group_of))

    def _shared(self, works: FloatArray) -> tuple[FloatArray, float]:
        """Work of the layers (K, n) by group in use: the least of work times speed, and the ranks' speeds."""
        speeds = speeds_of(works.sum(axis=1))
        return (works * speeds[:, None]).min(axis=0), float(speeds[list(self.kind_of)].sum())

    @cached_property
    def has_room_for_states(self) -> bool:
        """Whether the devices of all ranks can hold parameters, gradients and optimizer."""
        return bool(self._table(lambda layer: layer.static.total).min(axis=0).sum() <= self.room)

    def _table(self, of: Callable[[LayerEstimate], float]) -> FloatArray:
        """(K, n): a number of every layer with all of its copies, by group in use."""
        return np.array([[of(layer) * layer.copies for layer in each] for each in self.layers]).T

    def _rows(self, of: Callable[[LayerEstimate], Running]) -> FloatArray:
        """(K, n, 4): F, I, W and memory of every copy of every layer, by group in use."""
        rows = np.array([[row_of(of(layer)) for layer in each] for each in self.layers])
        return np.repeat(rows, [each[0].copies for each in self.layers], axis=0).swapaxes(0, 1)

    @cached_property
    def mean_bound(self) -> float:
        """Lower bound of the step in seconds: a rank has at least the mean of all ranks' work. Lemma 56."""
        m = self.layout.microbatches
        work, speed = self._shared(self._table(lambda layer: m * least_work_of(layer) + layer.step.total))
        return float(work.sum()) / speed * SECONDS

    @cached_property
    def least_once(self) -> float:
        """Lower bound in seconds of what the busiest rank does once per step: the mean."""
        once, speed = self._shared(self._table(lambda layer: layer.step.total))
        return float(once.sum()) / speed * SECONDS

    @cached_property
    def load_bound(self) -> float:
        """Lower bound of the step in seconds over all cuts, inf if it is proved that none fits.

        Lemmas 31-33, 35, 37, 56 and 57.
        """
        problem = self.problem
        tables = CutTables.of(problem)
        if surely_lacking(replace(tables, room=tables.most_room)) > 0:
            return math.inf
        least = least_worst_load(problem, tables) * problem.microbatches
        return least * SECONDS + self.least_once

    @cached_property
    def memory_bound(self) -> float:
        """Lower bound of the step in seconds from the path of a microbatch, and from memory times time.

        Lemmas 50 and 56 of bounds/PROOFS.md.

        Without recomputation, microbatches may hold memory for longer than there is room; recomputing layers
        takes time. The bound balances both.
        """
        recompute = self.layout.recompute
        plain = self._rows(lambda layer: layer.plain)
        again = self._rows(lambda layer: recomputed(layer, recompute) or layer.plain)
        if recompute == "none":
            again = plain
        if recompute in EVERYWHERE:
            plain = again
        works = plain[..., :3].sum(axis=2), again[..., :3].sum(axis=2)
        speeds = speeds_of(np.minimum(*works).sum(axis=1))
        of_plain, of_again = ((each * speeds[:, None]).min(axis=0) for each in works)
        work, speed = np.minimum(of_plain, of_again), float(speeds[list(self.kind_of)].sum())
        chain = np.minimum(plain[..., :2].sum(axis=2), again[..., :2].sum(axis=2)).min(axis=0)
        # From the start of a layer's F to the end of its I, all later layers run both.
        lasts = np.cumsum(chain[::-1])[::-1]
        room = self.room - float(self._table(lambda layer: layer.static.total).min(axis=0).sum())
        held = plain[..., 3].min(axis=0) * lasts
        saved = np.maximum(held - again[..., 3].min(axis=0) * lasts, 0.0)
        extra = np.maximum(of_again - work, 0.0)
        least = _balanced(work.sum() / speed, held.sum() / room, extra / speed, saved / room)
        return max(least * self.layout.microbatches, float(lasts[0])) * SECONDS + self.least_once

    @cached_property
    def problem(self) -> LayeredProblem:
        """The layers of one device of each rank, in microseconds and bytes."""
        layout, cluster = self.layout, self.setting.cluster
        ranks = layout.pipeline_parallel
        groups = [cluster.groups[group] for group in layout.group_of]
        is_mixed, first = bool(self.others), layout.used_groups[0]
        links = [_link_between(layout, cluster, rank, (rank + 1) % ranks) for rank in range(ranks)]
        own = self.setting.links(layout.in_group(first), first)[0].pipeline
        names = [f"{cluster.groups[each].preset or 'group'}-{each}" for each in layout.used_groups]
        return LayeredProblem(
            model=Model(tuple(problem_layer(each, names, layout.recompute) for each in self.layers)),
            pp_degree=ranks,
            microbatches=layout.microbatches,
            static=tuple(group.reserve for group in groups),
            limit=tuple(group.memory for group in groups),
            placement="v" if self.setting.is_v(ranks) else "auto",
            link=None if is_mixed else transfer(own),
            links=tuple(map(transfer, links)) if is_mixed else (),
            units=UNITS,
            devices=tuple(names[kind] for kind in self.kind_of) if is_mixed else (),
        )

    @property
    def passing(self) -> dict[str, int]:
        """By the name of a layer, gradients that exist only while the backwards of its stage run."""
        return {layer.name: layer.passing for layer in self.estimate.layers}

    def with_buffers(self, executor: str, stages: int) -> LayeredProblem:
        """The problem with what an executor holds for the transfers of so many stages per rank."""
        problem, layout = self.problem, self.layout
        if layout.pipeline_parallel == 1:
            return problem
        largest = max(layer.output_bytes for layer in self.estimate.layers)
        buffers = stages * STATES[executor].buffers(layout.microbatches, largest)
        return replace(problem, static=tuple(each + buffers for each in problem.static))

    def once(self, layers: list[tuple[str, ...]]) -> float:
        """Seconds that the busiest rank needs once per step, for the names of every rank's layers."""
        of = {name: [each.step.total for each in layer] for layer in self.layers for name in layer[0].names}
        busiest = max(
            sum(of[name][kind] for name in own) for own, kind in zip(layers, self.kind_of, strict=True)
        )
        return (busiest + self.estimate.table_reduction + self.latency) * SECONDS


@lru_cache(maxsize=64)
def _with_both(setting: Setting, is_v: bool, modules: Modules) -> Setting:
    """The setting of estimates with and without recomputation, of ``modules`` if there are any."""
    training = replace(setting.training, recompute="both", ends_share_rank=is_v)
    if modules:
        training = replace(training, modules=frozenset(modules))
    return replace(setting, training=training)


@lru_cache(maxsize=4096)
def _known_costs(setting: Setting, layout: Layout, group: int, ends: GroupLink | None) -> SourcedCosts:
    """The layers on a group of nodes; ``ends`` is the link between both ends of a pipeline over groups."""
    nodes, (links, _) = setting.cluster.groups[group], setting.links(layout, group)
    if ends is not None:
        links = replace(links, pipeline=ends)
    degrees = layout.degrees(nodes)
    at = (setting.model, degrees, nodes.device, links, setting.training, layout.microbatch_size)
    return setting.estimate(LayerConditions(*at))


def _link_between(layout: Layout, cluster: AnyCluster, rank: int, other: int) -> GroupLink:
    """The link between two pipeline ranks: in a group of nodes, the slowest between its pipeline ranks."""
    group = layout.group_of[rank]
    if group != layout.group_of[other]:
        return cluster.between_groups
    own = layout.in_group(group)
    return cluster.groups[group].link(own.stride("pp"), own.pipeline_parallel)


@lru_cache(maxsize=4096)
def _least_work_of_all(
    setting: Setting, groups: tuple[int, ...], tensor: int, context: int, expert: int, size: int
) -> tuple[float, dict[int, float]]:
    """Microseconds of a microbatch of ``size`` sequences on all layers, and speeds of the groups.

    Of every layer, the least of its time multiplied by speed counts.
    """
    works = [
        _least_works(setting, setting.cluster.groups[each], tensor, context, expert, size) for each in groups
    ]
    speeds = speeds_of(np.array([sum(each) for each in works]))
    shared = (
        min(each * speed for each, speed in zip(layer, speeds, strict=True))
        for layer in zip(*works, strict=True)
    )
    return float(sum(shared)), dict(zip(groups, speeds.tolist(), strict=True))


def _least_works(
    setting: Setting, cluster: Cluster, tensor: int, context: int, expert: int, size: int
) -> list[float]:
    """Microseconds of a microbatch on every layer with its copies, on equal nodes."""
    # Steps of rings take no time: links between nodes have none.
    links = cluster.in_node, cluster.between_nodes
    fastest = GroupLink(max(link.bandwidth or 0.0 for link in links), min(link.latency for link in links))

    def group(overlap: float) -> GroupLink:
        return replace(fastest, overlap=overlap)

    experts = group(cluster.expert_overlap)
    degrees = Degrees(tensor, tensor > 1, context, expert=expert, expert_in_node=expert)
    links_of_groups = GroupLinks(
        group(cluster.tensor_overlap), group(cluster.context_overlap), experts, experts
    )
    at = (setting.model, degrees, cluster.device, links_of_groups, setting.training, size)
    estimated = setting.estimate(LayerConditions(*at)).estimate
    return [least_work_of(layer) * layer.copies for layer in estimated.layers]


def _balanced(load: float, wanted: float, extra: FloatArray, saved: FloatArray) -> float:
    """The least T with T >= load + sum(x * extra) and T >= wanted - sum(x * saved), for 0 <= x <= 1.

    The items that save most for what they take come first, and the last one as a fraction.
    """
    useful = np.flatnonzero(saved > 0)
    for item in useful[np.argsort(extra[useful] / saved[useful], kind="stable")]:
        if load >= wanted:
            return load
        share = min(1.0, (wanted - load) / (extra[item] + saved[item]))
        load, wanted = load + share * extra[item], wanted - share * saved[item]
    return max(load, wanted)
