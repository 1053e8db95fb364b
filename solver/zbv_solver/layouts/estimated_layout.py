"""A layout as a problem for the planner, and bounds of its step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from zbv_solver.estimate.device import GroupLink, GroupLinks
from zbv_solver.estimate.layers import LayerEstimate, ModelEstimate, Running, Training, estimate_model
from zbv_solver.estimate.shapes import Degrees
from zbv_solver.estimate.transformer import Transformer
from zbv_solver.kernels.arrays import FloatArray
from zbv_solver.layouts.cluster import Cluster
from zbv_solver.layouts.layout import Layout
from zbv_solver.partition.cut_tables import CutTables
from zbv_solver.partition.floors import least_worst_load
from zbv_solver.problem.layer import Layer, LayerCosts, LayerMemory, Model
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.problem import Units

SECONDS = 1e-6
"""In a microsecond."""
UNITS = Units("us", "bytes")


@dataclass(frozen=True)
class Setting:
    """What all layouts of a search have in common.

    Attributes
    ----------
    has_loops
        Whether an executor chooses the placement: stages in a loop.
    """

    model: Transformer
    training: Training
    cluster: Cluster
    has_loops: bool = False

    def is_v(self, ranks: int) -> bool:
        """Whether the placement is V: with a shared table, if there are enough layers, it is held once."""
        if self.has_loops and ranks > 1:
            return False
        return self.model.tied and 2 * ranks <= self.model.n_layers

    def least_work(self, layout: Layout) -> float:
        """Lower bound of the step in seconds: compute and the fastest exchanges, none between replicas."""
        sizes = layout.tensor_parallel, layout.context_parallel, layout.expert_parallel
        work = _least_work_of_all(self, *sizes, layout.microbatch_size)
        return work * layout.microbatches / layout.pipeline_parallel * SECONDS


@dataclass(frozen=True, eq=False)
class EstimatedLayout:
    """A layout with the estimate of its layers.

    A step takes the span of the pipeline and what the busiest rank does once per step: reduce gradients,
    update parameters and gather them.
    """

    layout: Layout
    estimate: ModelEstimate
    setting: Setting

    @classmethod
    def of(cls, layout: Layout, setting: Setting) -> EstimatedLayout:
        """Estimate the layers under a layout."""
        cluster = setting.cluster
        estimate = estimate_model(
            setting.model,
            layout.degrees(cluster),
            cluster.device,
            layout.links(cluster),
            replace(setting.training, ends_share_rank=setting.is_v(layout.pipeline_parallel)),
            layout.microbatch_size,
        )
        return cls(layout, estimate, setting)

    @property
    def room(self) -> float:
        """Bytes of a device for layers."""
        return self.setting.cluster.memory - self.setting.cluster.reserve

    @cached_property
    def has_room_for_states(self) -> bool:
        """Whether the devices of all ranks can hold parameters, gradients and optimizer."""
        states = sum(layer.static.total * _copies(layer) for layer in self.estimate.layers)
        return states <= self.room * self.layout.pipeline_parallel

    @cached_property
    def mean_bound(self) -> float:
        """Lower bound of the step in seconds: a rank has at least the mean of all ranks' work."""
        work = sum(_least_work(layer) * _copies(layer) for layer in self.estimate.layers)
        once = sum(layer.step.total * _copies(layer) for layer in self.estimate.layers)
        return (work * self.layout.microbatches + once) / self.layout.pipeline_parallel * SECONDS

    @cached_property
    def least_once(self) -> float:
        """Lower bound in seconds of what the busiest rank does once per step: the mean."""
        once = sum(layer.step.total * _copies(layer) for layer in self.estimate.layers)
        return once / self.layout.pipeline_parallel * SECONDS

    @cached_property
    def load_bound(self) -> float:
        """Lower bound of the step in seconds over all cuts: Lemmas 31, 32, 33 and 37 of bounds/PROOFS.md."""
        problem = self.problem
        least = least_worst_load(problem, CutTables.of(problem)) * problem.microbatches
        return least * SECONDS + self.least_once

    @cached_property
    def memory_bound(self) -> float:
        """Lower bound of the step in seconds from memory times time: Lemma 54 of bounds/PROOFS.md.

        Without recomputation, microbatches may hold memory for longer than there is room; recomputing layers
        takes time. The bound balances both.
        """
        layers = [layer for layer in self.estimate.layers for _ in range(_copies(layer))]
        plain = np.array([_row(layer.plain) for layer in layers])
        again = np.array([_row(layer.recomputed or layer.plain) for layer in layers])
        if self.layout.recompute == "none":
            again = plain
        if self.layout.recompute == "full":
            plain = again
        work = np.minimum(plain[:, :3].sum(axis=1), again[:, :3].sum(axis=1))
        chain = np.minimum(plain[:, :2].sum(axis=1), again[:, :2].sum(axis=1))
        # From the start of a layer's F to the end of its I, all later layers run both.
        lasts = np.cumsum(chain[::-1])[::-1]
        room = self.layout.pipeline_parallel * self.room - sum(layer.static.total for layer in layers)
        held = plain[:, 3] * lasts
        saved = np.maximum(held - again[:, 3] * lasts, 0.0)
        extra = np.maximum(again[:, :3].sum(axis=1) - work, 0.0)
        ranks = self.layout.pipeline_parallel
        least = _balanced(work.sum() / ranks, held.sum() / room, extra / ranks, saved / room)
        return least * self.layout.microbatches * SECONDS + self.least_once

    @cached_property
    def problem(self) -> LayeredProblem:
        """The layers of one device of each rank, in microseconds and bytes."""
        layout, cluster = self.layout, self.setting.cluster
        ranks = layout.pipeline_parallel
        return LayeredProblem(
            model=Model(tuple(_layer(each, layout.recompute) for each in self.estimate.layers)),
            pp_degree=ranks,
            microbatches=layout.microbatches,
            static=(cluster.reserve,) * ranks,
            limit=(cluster.memory,) * ranks,
            placement="v" if self.setting.is_v(ranks) else "auto",
            link=cluster.transfer(layout.stride("pp"), ranks),
            units=UNITS,
        )

    def once(self, layers: list[tuple[str, ...]]) -> float:
        """Seconds that the busiest rank needs once per step, for the names of every rank's layers."""
        of = {name: layer.step.total for layer in self.estimate.layers for name in _names(layer)}
        busiest = max(sum(of[name] for name in own) for own in layers)
        return (busiest + self.estimate.table_reduction) * SECONDS


@lru_cache(maxsize=4096)
def _least_work_of_all(setting: Setting, tensor: int, context: int, expert: int, size: int) -> float:
    """Microseconds of a microbatch of ``size`` sequences on all layers."""
    cluster = setting.cluster
    links = cluster.in_node, cluster.between_nodes
    fastest = GroupLink(max(link.bandwidth or 0.0 for link in links), min(link.latency for link in links))

    def group(overlap: float) -> GroupLink:
        return replace(fastest, overlap=overlap)

    experts = group(cluster.expert_overlap)
    estimated = estimate_model(
        setting.model,
        Degrees(tensor, tensor > 1, context, expert=expert, expert_in_node=expert),
        cluster.device,
        GroupLinks(group(cluster.tensor_overlap), group(cluster.context_overlap), experts, experts),
        setting.training,
        size,
    )
    return sum(_least_work(layer) * _copies(layer) for layer in estimated.layers)


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


def _row(running: Running) -> tuple[float, float, float, float]:
    times = running.times
    return times.forward, times.backward_input, times.backward_weight, running.after_forward


def _copies(layer: LayerEstimate) -> int:
    return layer.repeat or 1


def _names(layer: LayerEstimate) -> tuple[str, ...]:
    return (layer.name,) if layer.repeat is None else tuple(f"{layer.name}.{k}" for k in range(layer.repeat))


def _least_work(layer: LayerEstimate) -> float:
    variants = [layer.plain] if layer.recomputed is None else [layer.plain, layer.recomputed]
    return min(running.times.total for running in variants)


def _layer(layer: LayerEstimate, recompute: str) -> Layer:
    plain, recomputed = layer.plain, layer.recomputed
    if recompute == "full" and recomputed is not None:
        plain, recomputed = recomputed, None
    return Layer(
        layer.name,
        _costs(plain, layer),
        None if recomputed is None or recompute == "none" else _costs(recomputed, layer),
        layer.static.parameters,
        layer.output_bytes,
        layer.repeat,
    )


def _costs(running: Running, layer: LayerEstimate) -> LayerCosts:
    times = running.times
    return LayerCosts(
        times.forward,
        times.backward_input,
        times.backward_weight,
        memory=LayerMemory(
            running.after_forward,
            running.after_input - running.after_forward,
            -running.after_input,
            layer.static.total,
            running.workspace,
        ),
    )
