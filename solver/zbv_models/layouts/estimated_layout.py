"""A layout as a problem for the planner, bounds of its step, and its plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from zbv_solver.kernels.jit import FloatArray
from zbv_solver.partition.cut_space import CutTables, speeds_of
from zbv_solver.partition.floors import least_worst_load
from zbv_solver.partition.least_memory import surely_lacking
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.cut import CutRules, Link
from zbv_solver.problem.layer import Layer, LayerCommunication, LayerCosts, LayerMemory, Model, OnDevice
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.problem import Problem, Units
from zbv_solver.search.incumbent import Cancelled
from zbv_solver.search.layered import first_plan, plan_layers
from zbv_solver.search.options import SearchOptions

from zbv_models.estimate.config import host_link
from zbv_models.estimate.device import GroupLink
from zbv_models.estimate.layers import LayerEstimate, ModelEstimate, kept_together
from zbv_models.estimate.replica import Running
from zbv_models.layouts.cluster import AnyCluster, transfer
from zbv_models.layouts.executor_memory import STATES
from zbv_models.layouts.layout import Layout
from zbv_models.layouts.measured_layers import LayerConditions, Origins
from zbv_models.layouts.setting import SECONDS, Modules, Setting

UNITS = Units("us", "bytes")
ANY_HOST = 1e15
"""Bytes that no host has: the limit of copies where it is absent, if another group of nodes has one."""
EVERYWHERE = ("selective", "full")
"""Kinds of recomputation that every stage has."""


@dataclass(frozen=True, eq=False)
class EstimatedLayout:
    """A layout with the estimate of its layers.

    A step takes the span of the pipeline and what the busiest rank does once per step: reduce gradients,
    update parameters and gather them.

    Bounds with ranks of several groups of nodes count every rank by the speed of its group: Lemma 56 of
    bounds/PROOFS.md.
    """

    layout: Layout
    setting: Setting
    estimates: tuple[ModelEstimate, ...]
    """The layers on each of the groups of nodes that the layout uses."""
    origins: tuple[Origins, ...] = ()
    """Where the costs of every layer come from; empty if all are estimated."""

    @classmethod
    def of(cls, layout: Layout, setting: Setting) -> EstimatedLayout:
        """Estimate the layers under a layout."""
        is_shared = setting.ends_share_rank(layout.pipeline_parallel)
        of_setting = _of_layout(setting, is_shared, layout.recompute_modules)
        # A search has layouts that differ only in their recomputation in succession.
        shared = replace(layout, recompute="per-stage", recompute_layers=None, recompute_modules=())
        if not layout.groups:
            estimate, origins = _known_costs(of_setting, shared, 0, None)
            return cls(layout, setting, (estimate,), origins)
        # The ranks of a group cost the same wherever they are in the pipeline, except for what both ends sum.
        ends = _link_between(layout, setting.cluster, 0, layout.pipeline_parallel - 1)
        estimates = (
            _known_costs(of_setting, shared.in_group(group), group, ends)[0] for group in layout.used_groups
        )
        return cls(layout, setting, tuple(estimates))

    @property
    def estimate(self) -> ModelEstimate:
        """The layers on the first of the groups."""
        return self.estimates[0]

    @cached_property
    def latency(self) -> float:
        """Microseconds once per step, of the replicas' exchanges."""
        return 0.0 if self.setting.measured is None else self.setting.links(self.layout)[1]

    @cached_property
    def room(self) -> float:
        """Bytes of a device of every rank together for layers."""
        return self.setting.room(self.layout)

    @cached_property
    def layers(self) -> tuple[tuple[LayerEstimate, ...], ...]:
        """Every layer on each of the groups in use."""
        return tuple(zip(*(each.layers for each in self.estimates), strict=True))

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
        work, speed = self._shared(self._table(lambda layer: m * layer.least_work + layer.step.total))
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
        tables = CutTables.of(problem.relaxed)
        if surely_lacking(tables._replace(room=tables.most_room)) > 0:
            return math.inf
        least = least_worst_load(problem.relaxed, tables) * problem.microbatches
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
        again = self._rows(lambda layer: layer.recomputed(recompute) or layer.plain)
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
        if self.setting.copies != "none":
            held[:] = 0.0  # it may all be on the host
        saved = np.maximum(held - again[..., 3].min(axis=0) * lasts, 0.0)
        extra = np.maximum(of_again - work, 0.0)
        least = balanced(work.sum() / speed, held.sum() / room, extra / speed, saved / room)
        return max(least * self.layout.microbatches, float(lasts[0])) * SECONDS + self.least_once

    @cached_property
    def problem(self) -> LayeredProblem:
        """The layers of one device of each rank, in microseconds and bytes."""
        layout, cluster = self.layout, self.setting.cluster
        ranks = layout.pipeline_parallel
        groups = [cluster.groups[group] for group in layout.group_of]
        is_mixed, first = len(self.estimates) > 1, layout.used_groups[0]
        links = [_link_between(layout, cluster, rank, (rank + 1) % ranks) for rank in range(ranks)]
        own = self.setting.links(layout.in_group(first), first)[0].pipeline
        names = [f"{cluster.groups[each].preset or 'group'}-{each}" for each in layout.used_groups]
        is_shared = self.setting.ends_share_rank(ranks)
        return LayeredProblem(
            model=Model(tuple(problem_layer(each, names, layout.recompute) for each in self.layers)),
            pp_degree=ranks,
            microbatches=layout.microbatches,
            static=tuple(group.reserve for group in groups),
            limit=tuple(group.memory for group in groups),
            placement="v" if self.setting.is_v(ranks) else "auto",
            rules=CutRules(kept_together(self.setting.model, self.estimate.layers, is_shared)),
            link=None if is_mixed else transfer(own),
            links=tuple(map(transfer, links)) if is_mixed else (),
            units=UNITS,
            devices=tuple(names[kind] for kind in self.kind_of) if is_mixed else (),
            pair_factor=self.pair_factor,
            **self._host,
        )

    @property
    def _host(self) -> dict[str, Any]:
        """The link to the host, the slowest of the groups, and the room there, if plans may have copies."""
        groups = [self.setting.cluster.groups[group] for group in self.layout.group_of]
        links = [link for each in groups if (link := host_link(self.setting.copies, each.device)) is not None]
        if not links:
            return {}
        slowest = Link(max(link.latency for link in links), min(link.bandwidth for link in links))
        if all(each.host_memory is None for each in groups):
            return {"host": slowest}
        rooms = (
            ANY_HOST if each.host_memory is None else each.host_memory / each.gpus_per_node for each in groups
        )
        return {"host": slowest, "host_limit": tuple(rooms)}

    @property
    def pair_factor(self) -> float:
        """What the two actions of a pair cost each other: that of the device where it is largest."""
        return max(layer.plain.pair_factor for layers in self.layers for layer in layers)

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

    @cached_property
    def _by_name(self) -> dict[str, tuple[LayerEstimate, ...]]:
        """Every copy of every layer on each of the groups in use."""
        return {name: each for each in self.layers for name in each[0].names}

    def layer_on(self, name: str, rank: int) -> LayerEstimate:
        """A layer on the devices of a rank."""
        return self._by_name[name][self.kind_of[rank]]

    def once(self, layers: list[tuple[str, ...]]) -> float:
        """Seconds that the busiest rank needs once per step, for the names of every rank's layers."""
        busiest = max(
            sum(self.layer_on(name, rank).step.total for name in own) for rank, own in enumerate(layers)
        )
        return (busiest + self.estimate.table_reduction + self.latency) * SECONDS


@dataclass(frozen=True, eq=False)
class PlannedLayout:
    """A layout with the plan of its pipeline."""

    estimated: EstimatedLayout
    plan: Plan
    step_time: float
    """Seconds."""
    lower_bound: float
    """Of the step, over all cuts, placements and orders of this layout."""

    @property
    def layout(self) -> Layout:
        """The degrees."""
        return self.estimated.layout

    @property
    def recomputed(self) -> frozenset[str]:
        """The names of the layers that the plan recomputes, in full or selectively."""
        model, layout = self.plan.problem.model, self.layout
        if model is None or layout.recompute == "none":
            return frozenset()
        able = {
            name
            for layer in self.estimated.estimate.layers
            if layer.recomputed(layout.recompute) is not None
            for name in layer.names
        }
        # Modules of multi-token prediction are not counted among the layers of a stage.
        blocks = {name for name in able if not name.startswith("prediction")}
        names: set[str] = set()
        for stage, is_again in zip(model.partition, model.cut.recompute, strict=True):
            if layout.recompute_layers is not None:
                names.update([name for name in stage if name in blocks][: layout.recompute_layers])
            elif is_again or layout.recompute in EVERYWHERE:
                names.update(stage)
        return frozenset(names & able)


def plan_layout(
    estimated: EstimatedLayout, options: SearchOptions | None = None, cancelled: Cancelled | None = None
) -> PlannedLayout:
    """Plan the pipeline of a layout, without options by constructing orders alone.

    Raises :class:`InfeasibleMemory` when no cut fits.
    """
    if options is None:
        return with_plan(estimated, first_plan(estimated.problem, cancelled))
    return with_plan(estimated, plan_layers(estimated.problem, options, None, cancelled))


def with_plan(estimated: EstimatedLayout, plan: Plan) -> PlannedLayout:
    """A layout with a plan of its pipeline: adds what happens once per step."""
    if plan.cut is None:  # for type checkers: layers have a cut
        raise TypeError("a plan of layers has no cut; this is a bug in zbv, please report it.")
    of_ranks = layers_on_ranks(plan.problem)
    bound = max(plan.cut.lower_bound * SECONDS + estimated.least_once, estimated.memory_bound)
    return PlannedLayout(estimated, plan, plan.objective * SECONDS + estimated.once(of_ranks), bound)


def layers_on_ranks(problem: Problem) -> list[tuple[str, ...]]:
    """The names of every rank's layers, in a problem that was cut from layers."""
    partition = () if problem.model is None else problem.model.partition
    return [tuple(name for s in stages for name in partition[s]) for stages in problem.placement.stages_of]


@lru_cache(maxsize=64)
def _of_layout(setting: Setting, ends_share_rank: bool, modules: Modules) -> Setting:
    """The setting of a layout's estimates; selective recomputation repeats ``modules`` if there are any."""
    training = replace(setting.training, ends_share_rank=ends_share_rank)
    if modules:
        training = replace(training, modules=frozenset(modules))
    return replace(setting, training=training)


@lru_cache(maxsize=4096)
def _known_costs(
    setting: Setting, layout: Layout, group: int, ends: GroupLink | None
) -> tuple[ModelEstimate, tuple[Origins, ...]]:
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


def balanced(load: float, wanted: float, extra: FloatArray, saved: FloatArray) -> float:
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


def problem_layer(layers: tuple[LayerEstimate, ...], devices: list[str], recompute: str) -> Layer:
    """A layer, from its estimates on several devices."""
    layer, costs = layers[0], [_both_costs(each, recompute) for each in layers]
    return Layer(
        layer.name,
        *costs[0],
        layer.static.parameters,
        layer.output_bytes,
        layer.repeat,
        tuple(OnDevice(device, *each) for device, each in zip(devices[1:], costs[1:], strict=True)),
    )


def _both_costs(layer: LayerEstimate, recompute: str) -> tuple[LayerCosts, LayerCosts | None]:
    plain, again = layer.plain, layer.recomputed(recompute)
    if recompute in EVERYWHERE and again is not None:
        plain, again = again, None
    return _costs(plain, layer), None if again is None else _costs(again, layer)


def _costs(running: Running, layer: LayerEstimate) -> LayerCosts:
    times, hidden = running.times, running.hidden
    return LayerCosts(
        times.forward,
        times.backward_input,
        times.backward_weight,
        running.fused,
        LayerMemory(
            running.after_forward,
            running.after_input - running.after_forward,
            -running.after_input,
            layer.static.total,
            running.workspace,
        ),
        LayerCommunication(hidden.forward, hidden.backward_input, hidden.backward_input)
        if hidden.total
        else None,
    )


def row_of(running: Running) -> tuple[float, float, float, float]:
    """Least times of F, I and W, and the memory held after F."""
    times = running.shortest
    return times.forward, times.backward_input, times.backward_weight, running.after_forward


def least_memory(estimated: EstimatedLayout) -> float:
    """Lower bound of the fullest rank's memory in bytes: the mean of all ranks.

    When the last stage has computed F of a microbatch, all stages hold what this F keeps.
    """
    layout, groups = estimated.layout, estimated.setting.cluster.groups
    held = sum(
        min(_held(layer, layout.recompute, estimated.setting.copies) for layer in layers) * layers[0].copies
        for layers in estimated.layers
    )
    return held / layout.pipeline_parallel + min(groups[each].reserve for each in layout.used_groups)


def _held(layer: LayerEstimate, recompute: str, copies: str) -> float:
    """Bytes of a layer's states, and what F of a microbatch keeps on the device at least."""
    if copies != "none":
        return layer.static.total
    kept, again = layer.plain.after_forward, layer.recomputed(recompute)
    if again is not None:
        kept = min(kept, again.after_forward)
    return layer.static.total + kept
