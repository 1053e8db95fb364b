"""What all layouts of a search have in common, and what selective recomputation may repeat of a model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache

import numpy as np
from zbv_solver.partition.cut_space import speeds_of
from zbv_solver.problem.layer import Recomputed

from zbv_models.estimate.attention import Attention
from zbv_models.estimate.config import CopiesChoice
from zbv_models.estimate.device import GroupLink, GroupLinks
from zbv_models.estimate.latent_attention import LatentAttention
from zbv_models.estimate.layers import ModelEstimate, Training, estimate_model, without_replicas
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.model_layers import blocks, count_layers, layer_kinds, shapes_of, whole_halves
from zbv_models.estimate.part import Part
from zbv_models.estimate.shapes import Degrees
from zbv_models.estimate.states import static_of
from zbv_models.estimate.times import is_known
from zbv_models.layouts.cluster import AnyCluster, Cluster
from zbv_models.layouts.executor_memory import STATES
from zbv_models.layouts.layout import Layout
from zbv_models.layouts.measured_layers import LayerConditions, Measured, Origins

SECONDS = 1e-6
"""In a microsecond."""

# ``core_attn``, Megatron-LM's default, is in all sets for plain attention, and in none for flash attention.
# That keeps statistics of the scores alone, and would be computed twice for these.
Modules = tuple[Recomputed, ...]
CHEAP: Modules = ("mla_up_proj", "moe_act")
SETS: tuple[Modules, ...] = (
    (*CHEAP, "layernorm"),
    (*CHEAP, "layernorm", "mlp", "shared_experts"),
    ("mla_up_proj", "layernorm", "mlp", "moe"),
)
"""``moe`` repeats ``moe_act`` and ``shared_experts``, too, and the exchanges between experts."""
OP: Modules = ("op",)
"""What torchtitan recomputes instead of modules."""


def droppable(model: Transformer) -> frozenset[str]:
    """The modules whose recomputation drops a tensor of any layer."""
    return frozenset(
        module
        for kind in layer_kinds(model)
        if kind.can_recompute
        for _, half in kind.halves
        for tensor in half.part(shapes_of(model, kind, Degrees())).tensors
        for module in tensor.modules
    )


def has_operations(model: Transformer) -> bool:
    """Whether it is known what torchtitan's selective recomputation saves of every block."""
    return all(
        is_known(half.part(shapes_of(model, kind, Degrees())) for _, half in kind.halves)
        for kind in blocks(model)
    )


def cheap_modules(model: Transformer) -> Modules:
    """The modules of a model that take little time to repeat; empty without any."""
    able = droppable(model)
    return (*_scores(model), *(module for module in CHEAP if module in able))


def module_sets(model: Transformer) -> tuple[Modules, ...]:
    """The different sets of a model, without modules that it does not have."""
    able, scores = droppable(model), _scores(model)
    found = ((*scores, *(module for module in each if module in able)) for each in ((), *SETS))
    return tuple(dict.fromkeys(filter(None, found)))


def keeps_scores(model: Transformer) -> bool:
    """Whether any attention is plain, which keeps its scores."""
    return any(
        isinstance(half, Attention | LatentAttention) and not half.sees.flash for half in whole_halves(model)
    )


def _scores(model: Transformer) -> Modules:
    return ("core_attn",) if keeps_scores(model) else ()


@dataclass(frozen=True)
class Setting:
    """What all layouts of a search have in common."""

    model: Transformer
    training: Training
    cluster: AnyCluster
    measured: Measured | None = None
    """What profiles measured, which replaces estimates."""
    copies: CopiesChoice = "none"
    """What plans may copy to the host."""
    has_loops: bool = False
    """Whether an executor chooses the placement: stages in a loop."""
    module_sets: tuple[Modules, ...] = ()
    """What executors with selective recomputation of modules may repeat; torchtitan has ``op`` instead."""

    def __hash__(self) -> int:
        return self._hash  # caches of costs ask for it for every layout

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, each.name) for each in fields(self)))

    def is_v(self, ranks: int) -> bool:
        """Whether the placement is V: with a shared table, if there are enough layers, it is held once."""
        if self.has_loops and ranks > 1:
            return False
        return self.model.tied_embeddings and 2 * ranks <= count_layers(self.model)

    def ends_share_rank(self, ranks: int) -> bool:
        """Whether embedding and head are on one rank, which then holds shared tables once."""
        return ranks == 1 or self.is_v(ranks)

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

    def estimate(self, at: LayerConditions) -> tuple[ModelEstimate, tuple[Origins, ...]]:
        """Layers under these conditions, with measured costs where a profile has them.

        And where the costs of every layer come from; empty if all are estimated.
        """
        estimate = estimate_model(*at)
        return (estimate, ()) if self.measured is None else self.measured.applied(estimate, at)

    def links(self, layout: Layout, group: int = 0) -> tuple[GroupLinks, float]:
        """The links on a group of nodes, measured ones where a profile has them, and a latency once per step.

        Buckets join the gradients of layers, so the latency of measured all-reduces counts once.
        """
        nodes, measured = self.cluster.groups[group], self.measured
        links = layout.links(nodes)
        if measured is None:
            return links, 0.0
        is_near = {kind: nodes.is_in_node(layout.stride(kind), size) for kind, size in layout.sizes.items()}
        pipeline = measured.pipeline_link() if is_near["pp"] else None
        replicas = layout.data_parallel * layout.context_parallel
        data = measured.data_link(replicas, layout.zero_stage) if is_near["cp"] and is_near["dp"] else None
        latency = 0.0
        if data is not None:
            latency = data.latency if replicas > 1 else 0.0
            data = GroupLink(data.bandwidth, 0.0, links.data.overlap)
            links = replace(links, data=data, expert_data=data)
        return replace(links, pipeline=pipeline or links.pipeline), latency

    def room(self, layout: Layout) -> float:
        """Bytes of a device of every rank together for layers."""
        groups = self.cluster.groups
        counts = {group: layout.group_of.count(group) for group in layout.used_groups}
        return sum((groups[each].memory - groups[each].reserve) * count for each, count in counts.items())

    def states(self, layout: Layout) -> float:
        """Bytes of parameters, gradients and optimizer on a device of every rank together, as estimated."""
        degrees = replace(layout.degrees(self.cluster.groups[0]), expert_in_node=1)
        return _states(self, degrees, self.ends_share_rank(layout.pipeline_parallel))

    def surely_lacks_room(self, layout: Layout) -> bool:
        """Whether the states alone are too large, as known without an estimate of the layers."""
        return self.measured is None and self.states(layout) > self.room(layout)

    def least_work(self, layout: Layout) -> float:
        """Lower bound of the step in seconds: compute and the fastest exchanges, none between replicas.

        Lemma 56 of bounds/PROOFS.md.
        """
        sizes = layout.tensor_parallel, layout.context_parallel, layout.expert_parallel
        work, speeds = _least_work_of_all(self, layout.used_groups, *sizes, layout.microbatch_size)
        speed = sum(map(speeds.__getitem__, layout.group_of)) if layout.groups else layout.pipeline_parallel
        return work * layout.microbatches / speed * SECONDS


@lru_cache(maxsize=4096)
def _states(setting: Setting, degrees: Degrees, ends_share_rank: bool) -> float:
    """Bytes of the states of all layers, on one device of every rank together."""
    training = setting.training
    counts = _parts(setting.model, training.kept(degrees).accumulated, ends_share_rank)
    return sum(static_of(training.shares(part, degrees)).total * count for part, count in counts.items())


@lru_cache(maxsize=64)
def _parts(model: Transformer, gradient_bytes: float, ends_share_rank: bool) -> Counter[Part]:
    """How many equal parts a model has, without parallelism."""
    found: Counter[Part] = Counter()
    for kind in layer_kinds(model, gradient_bytes, ends_share_rank):
        shapes = shapes_of(model, kind, Degrees())
        for _, half in kind.halves:
            found[half.part(shapes)] += kind.count
    return found


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
    if setting.measured is None:
        return [sum(each.least_work for each in layers) * count for layers, count in without_replicas(*at)]
    estimate, _ = setting.estimate(LayerConditions(*at))
    return [layer.least_work * layer.copies for layer in estimate.layers]
