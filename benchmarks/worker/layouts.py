"""Predicted against measured steps of all layouts of a few processes, for small models.

The layers of every size of microbatches are profiled, and so are transfers and all-reduces. From these,
`zbv layout` predicts the step of each layout: pipeline ranks, replicas, size of a microbatch, and whether the
replicas share optimizer states (`--shard`, which exchanges what ZeRO stage 1 does). Then all layouts run in
turns, in one of two ways:

- ``sleep``: processes sleep as long as the profile says instead of computing, as in a rehearsal. Transfers
  and collectives are real. So every process has a separate device, also with more processes than cores.
- ``compute``: processes train. If there are more processes than cores, a simulation of shared cores
  (:mod:`benchmarks.worker.shared_cores`) predicts the step of the planned orders.

Layers are profiled with a process per core, links with all processes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import ConfigDict

from benchmarks.findings import Finding, Target
from benchmarks.worker.ranks import on_ranks
from benchmarks.worker.workload import workload_json

if TYPE_CHECKING:
    from zbv_models.estimate.layers import LayerEstimate
    from zbv_models.layouts.search import PlannedLayout
    from zbv_worker.transport.world import World

FACTORY = "zbv_worker.models.gpt:gpt"
LONGEST = 1.05
"""Measured step of the predicted best layout over that of the measured best one."""
SHARDED = 1
"""The ZeRO stage that exchanges what `--shard` does: parameters are gathered once per step."""
Document = dict[str, Any]


@dataclass(frozen=True)
class SmallModel:
    """A GPT, and the sequences of a step."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    blocks: int
    width: int
    heads: int
    length: int
    batch: int

    def __str__(self) -> str:
        return f"{self.blocks} x {self.width}, {self.batch} x {self.length}"

    def spec(self, sequences: int) -> Document:
        """The model's factory, for microbatches of a number of sequences."""
        arguments = {"layers": self.blocks, "width": self.width, "heads": self.heads, "length": self.length}
        return {"factory": FACTORY, "arguments": {**arguments, "sequences": sequences, "characters": 100_000}}

    def document(self) -> Document:
        """For `zbv layout`."""
        from zbv_worker.models.text import VOCABULARY

        model = {
            **{"hidden": self.width, "layers": self.blocks, "heads": self.heads, "sequence": self.length},
            **{"vocabulary": VOCABULARY, "positions": "learned", "norm": "layernorm", "dtype": "float32"},
        }
        return {"model": model, "global_batch": self.batch}


@dataclass(frozen=True)
class LayoutsWorkload:
    """Models, and how they are measured."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    processes_do: Literal["sleep", "compute"] = "sleep"
    """Whether processes sleep or compute."""
    models: tuple[SmallModel, ...] = (
        SmallModel(6, 128, 4, 128, 8),
        SmallModel(6, 256, 4, 128, 8),
        SmallModel(6, 96, 4, 512, 8),
    )
    processes: int = 4
    """Ranks of every layout."""
    sharded: bool = True
    """Whether to run layouts with `--shard`, too."""
    repeats: int = 10
    """Measurements of every layer."""
    steps: int = 4
    """Steps of a layout in a turn, after one that is not counted."""
    rounds: int = 7
    """Measured turns, after one that warms up."""


@dataclass(frozen=True)
class Predicted:
    """A layout with its predicted step in seconds."""

    planned: PlannedLayout
    seconds: float

    def __str__(self) -> str:
        layout = self.planned.layout
        sharded = ", sharded" if layout.zero_stage else ""
        return (
            f"{layout.pipeline_parallel} ranks x {layout.data_parallel} replicas, {layout.microbatches} "
            f"microbatches of {layout.microbatch_size}{sharded}"
        )


def measure(workload: LayoutsWorkload) -> list[Finding]:
    """Profile, predict and run all layouts of every model."""
    found: list[Finding] = []
    for model in workload.models:
        layouts = predicted(model, workload)
        found += findings(str(model), layouts, measured(model, layouts, workload))
    return found


def predicted(model: SmallModel, workload: LayoutsWorkload) -> list[Predicted]:
    """All layouts with their predicted steps."""
    from zbv_models.layouts.cluster import parse_cluster
    from zbv_models.layouts.estimated_layout import EstimatedLayout
    from zbv_models.layouts.layout import Fixed
    from zbv_models.layouts.profile import parse_profile
    from zbv_models.layouts.request import parse_request
    from zbv_models.layouts.search import plan_layout

    cluster = parse_cluster(CLUSTER | {"gpus_per_node": workload.processes})
    fixed = Fixed(tensor_parallel=1, context_parallel=1, placement="tp-cp-dp-pp", recompute="none")
    request = parse_request(model.document(), cluster, fixed)
    stages = (0, SHARDED) if workload.sharded else (0,)
    layouts = [layout for layout in request.layouts if layout.zero_stage in stages]
    sizes = sorted({layout.microbatch_size for layout in layouts})
    profiles = [parse_profile(each, str(at)) for at, each in enumerate(profiled(model, sizes, workload))]
    setting = replace(request, profiles=tuple(profiles)).setting
    planned = [plan_layout(EstimatedLayout.of(layout, setting)) for layout in layouts]
    return [Predicted(each, _predicted_seconds(each, workload)) for each in planned]


def _predicted_seconds(planned: PlannedLayout, workload: LayoutsWorkload) -> float:
    """What `zbv layout` says; if processes share cores, what the simulation says."""
    from zbv_models.layouts.estimated_layout import SECONDS
    from zbv_worker.host.cores import usable_cores

    from benchmarks.worker.shared_cores import PerStep, step_time

    cores = len(usable_cores())
    if workload.processes_do == "sleep" or cores >= workload.processes:
        return planned.step_time
    steps = [[layer.step for layer in layers] for layers in own_layers(planned)]
    once = PerStep(
        [
            planned.estimated.latency
            + sum(each.gradient_reduction + each.parameter_gathering for each in own)
            for own in steps
        ],
        [sum(each.optimizer for each in own) for own in steps],
    )
    return step_time(planned.plan, planned.layout.data_parallel, cores, once) * SECONDS


def own_layers(planned: PlannedLayout) -> list[list[LayerEstimate]]:
    """The layers of every pipeline rank."""
    problem = planned.plan.problem
    if problem.model is None:
        raise TypeError("a plan of layers has no cut; this is a bug in zbv, please report it.")
    bounds, each = problem.model.cut.bounds, problem.model.model.each
    of_kind = {layer.name: layer for layer in planned.estimated.estimate.layers}
    return [
        [of_kind[layer.name] for stage in stages for layer in each[bounds[stage] : bounds[stage + 1]]]
        for stages in problem.placement.stages_of
    ]


CLUSTER: Document = {
    "nodes": 1,
    "device": {"achieved_tflops": 0.05, "memory_bandwidth": 5.0},
    "memory": 1e12,
    "links": {name: {"latency": 50, "bandwidth": 1.0} for name in ("in_node", "between_nodes")},
}
"""Rates that matter only where a profile says nothing: it has all layers, transfers and all-reduces."""


def profiled(model: SmallModel, sizes: Sequence[int], workload: LayoutsWorkload) -> Iterator[Document]:
    """Profiles of microbatches of some sizes; the first has the links between all processes."""
    from zbv_worker.host.cores import usable_cores
    from zbv_worker.measure.profile.layers import to_layered_document
    from zbv_worker.measure.profile.profile import ProfileOptions, measure_ranks
    from zbv_worker.model.spec import ModelSpec

    def profile(size: int, ranks: int) -> Document:
        spec = ModelSpec(**model.spec(size))
        options = ProfileOptions(spec, ranks, microbatches=4, repeats=workload.repeats, by_layer=True)
        return to_layered_document(options, measure_ranks(options))

    cores = min(workload.processes, len(usable_cores()))
    links = profile(sizes[0], workload.processes)
    for size in sizes:
        is_same = cores == workload.processes and size == sizes[0]
        document = links if is_same else profile(size, cores)
        if size == sizes[0]:
            document["costs"] = links["costs"]
        for name in ("all_reduce", "scatter_gather"):
            document["profile"][name] = links["profile"][name] if size == sizes[0] else []
        yield document


def measured(model: SmallModel, layouts: Sequence[Predicted], workload: LayoutsWorkload) -> list[float]:
    """Seconds of a step of every layout, measured in turns."""
    asked = [_request(model, each.planned) for each in layouts]
    request = {"workload": workload_json(workload), "layouts": asked}
    answers = on_ranks("layouts", request, workload.processes)
    return [
        median(max(of_ranks) for of_ranks in zip(*by_rank, strict=True))
        for by_rank in zip(*answers, strict=True)
    ]


def _request(model: SmallModel, planned: PlannedLayout) -> Document:
    """What the ranks need of a layout."""
    from zbv_solver.plans.plan import plan_json

    layout, cut_model = planned.layout, planned.plan.problem.model
    if cut_model is None:
        raise TypeError("a plan of layers has no cut; this is a bug in zbv, please report it.")
    each, own = cut_model.model.each, own_layers(planned)
    return {
        "spec": model.spec(layout.microbatch_size),
        "replicas": layout.data_parallel,
        "sharded": layout.zero_stage == SHARDED,
        "plan": plan_json(planned.plan),
        "crossing": [each[bound - 1].output_bytes if bound else 0 for bound in cut_model.cut.bounds[1:-1]],
        "gradients": [sum(layer.static.gradients for layer in layers) for layers in own],
        "update": [sum(layer.step.optimizer for layer in layers) for layers in own],
    }


def findings(name: str, layouts: Sequence[Predicted], times: Sequence[float]) -> list[Finding]:
    """Every layout's prediction, the fastest first, and how well the predictions choose."""
    from benchmarks.published.ranking import spearman

    found = []
    for each, seconds in sorted(zip(layouts, times, strict=True), key=lambda pair: pair[1]):
        found += [
            Finding(f"{name}: {each}: measured", seconds * 1e3, "ms"),
            Finding(f"{name}: {each}: predicted / measured", each.seconds / seconds),
        ]
    chosen = min(range(len(layouts)), key=lambda at: layouts[at].seconds)
    rank = spearman([each.seconds for each in layouts], times)
    if rank is not None:
        found.append(Finding(f"{name}: rank correlation of {len(times)} layouts", rank))
    loss = times[chosen] / min(times)
    return [*found, Finding(f"{name}: step of the predicted best / of the best", loss, "", Target(LONGEST))]


# --- on a rank


class Steps(Protocol):
    """The steps of one layout."""

    def step(self, step: int) -> object:
        """Run a step."""

    def meet(self) -> object:
        """Wait for all ranks."""


def on_rank(request: Mapping[str, Any], world: World) -> Any:
    """Seconds of a step, by layout and round."""
    from benchmarks.worker.layout_steps import ComputedSteps, SleptSteps

    workload = request["workload"]
    kind = ComputedSteps if workload["processes_do"] == "compute" else SleptSteps
    with ExitStack() as stack:
        steps = [kind(each, world, stack) for each in request["layouts"]]
        return _in_turns(steps, workload["rounds"], workload["steps"])


def _in_turns(layouts: Sequence[Steps], rounds: int, steps: int) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in layouts]
    places = range(len(layouts))
    for turn in range(1 + rounds):
        for place in places[:: 1 if turn % 2 else -1]:
            layout, first = layouts[place], turn * (steps + 1)
            layout.meet()
            layout.step(first)
            begun = time.perf_counter()
            for step in range(first + 1, first + 1 + steps):
                layout.step(step)
            if turn:
                times[place].append((time.perf_counter() - begun) / steps)
    return times
