"""Measured runs of training, published or own; docs/formats.md documents the file."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.sections import ConfigSection, Count, Flag, Rate, Size, preset_names, with_presets
from zbv_models.layouts.cluster import Cluster, equal_cluster
from zbv_solver.documents.files import load
from zbv_solver.documents.validation import validated
from zbv_solver.errors import InvalidInput, Issue
from zbv_solver.problem.layer import Recomputed

HERE = Path(__file__).parent
RUNS, MODELS = HERE / "runs.json", HERE / "models.json"
USEFUL_NETWORK = 0.75
"""Share of a network that transfers reach, as in the presets of devices."""
BITS = 8
HIDDEN = 0.8
"""Share of an exchange that compute hides where a program overlaps both; assumed."""
LAUNCH_TIME = 20.0
"""Microseconds that the host adds to every kernel where a launch waits for the kernel's end.

A kernel of PyTorch begins about 20 us after its launch (NVIDIA, Understanding the Visualization of Overhead
and Latency in Nsight Systems, figure 1).
"""
Section = dict[str, Any]
States = dict[Literal["gradients", "master", "state"], Rate]
Precision = Literal["fp16", "bf16", "fp8", "fp4"]


class MeasuredRun(ConfigSection):
    """One run. What is absent is not known; :mod:`benchmarks.published.predict` has the rules for it."""

    id: str = Field(description="unique name")
    source: str = Field(description="who measured it: paper and table, or repository, commit and file")
    held_out: Flag = Field(
        False, description="whether no rule and no constant was chosen with this run in view"
    )
    system: str = Field(description="the program; the report has a row per system and model")
    name: str = Field(description="the model's name in the report")
    model: str = Field(description="a preset, or a model of benchmarks/published/models.json")
    sizes: Section = Field({}, description="keys of the section model that differ")
    device: str | Section = Field(description="a preset, or a section device, with its presets")
    devices: Size = Field(description="number of devices")
    devices_per_node: Size = Field(8, description="devices that the fast link connects")
    network_gbit_s: Rate | None = Field(
        None, description="Gb/s of a device's network; null: as the device says"
    )
    sequence: Size = Field(description="tokens per sequence")
    microbatch_size: Size = Field(description="sequences per microbatch")
    global_batch: Size = Field(description="sequences per step")
    tensor_parallel: Size = 1
    context_parallel: Size = 1
    expert_parallel: Size = 1
    pipeline_parallel: Size = 1
    virtual_stages: Size = Field(1, description="stages per rank, with which 1F1B is interleaved")
    schedule: Literal["1f1b", "zb-1p", "zb-2p"] = Field("1f1b", description="the order")
    stages: tuple[Count, ...] | None = Field(None, description="blocks of every stage, in model order")
    zero_stage: Annotated[int, Field(strict=True, ge=0, le=3)] | None = None
    sequence_parallel: Flag | None = None
    recompute: Literal["none", "full"] | tuple[Recomputed, ...] | None = None
    precision: Precision | None = None
    hides: tuple[Literal["tensor", "expert", "data", "gradients", "pipeline"], ...] = Field(
        (),
        description="groups whose exchanges the program overlaps with compute; gradients: of data, "
        "only their reduction",
    )
    fused_gradients: Flag = Field(
        True, description="whether products of W add their results to the accumulated gradients"
    )
    blocking_launches: Flag = Field(
        False, description="whether each launch waits for the kernel's end (CUDA_LAUNCH_BLOCKING=1)"
    )
    transfers_in_turn: Flag = Field(
        False, description="whether ranks send an output and receive a gradient one after the other"
    )
    states: States = Field(
        default_factory=dict,
        description="bytes per parameter of gradients, master copy and each state; absent: by precision",
    )
    step_time_s: Rate | None = None
    step_time_from: str | None = Field(None, description="what the step time was computed from")
    model_tflops: Rate | None = Field(
        None, description="instead of a step time: TFLOP/s of a device, without recomputation"
    )
    memory_gb: Rate | None = Field(None, description="most memory of a device, 10⁹ bytes")
    memory_kind: Literal["allocated", "device"] = Field(
        "allocated", description="tensors only, or all memory that is taken on the device"
    )
    memory_rank: Literal[-1] | None = Field(None, description="-1: of the last rank; null: of the fullest")
    out_of_memory: Flag = Field(False, description="whether the run ended for lack of memory")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        whole = self.tensor_parallel * self.context_parallel * self.pipeline_parallel
        if self.devices % whole:
            raise ValueError(
                f"{self.devices} devices; must be a multiple of the parallel degrees' product, {whole}"
            )
        if self.global_batch % (self.replicas * self.microbatch_size):
            raise ValueError(
                f"a global batch of {self.global_batch}; must be a multiple of replicas times "
                f"microbatch size, {self.replicas * self.microbatch_size}"
            )
        if self.stages is not None and len(self.stages) != self.n_stages:
            raise ValueError(f"{len(self.stages)} stages; must be {self.n_stages}")
        return self

    @property
    def replicas(self) -> int:
        """Data-parallel replicas."""
        return self.devices // (self.tensor_parallel * self.context_parallel * self.pipeline_parallel)

    @property
    def microbatches(self) -> int:
        """Per step and replica."""
        return self.global_batch // (self.replicas * self.microbatch_size)

    @property
    def n_stages(self) -> int:
        """Stages of the pipeline."""
        return self.pipeline_parallel * self.virtual_stages


class RunsFile(ConfigSection):
    """The document of measured runs."""

    runs: tuple[MeasuredRun, ...] = Field(min_length=1)


def load_runs(path: Path = RUNS) -> tuple[MeasuredRun, ...]:
    """The runs of a file.

    Raises :class:`InvalidInput` with one issue per broken rule; pointers are into the document.
    """
    return load(path, parse_runs)


def parse_runs(document: Any) -> tuple[MeasuredRun, ...]:
    """The runs of a decoded JSON document; raises :class:`InvalidInput`."""
    runs = validated(RunsFile, document).runs
    seen: set[str] = set()
    issues = []
    for place, run in enumerate(runs):
        if run.id in seen:
            issues.append(Issue(f"/runs/{place}/id", f"found {run.id!r} again; names must be unique."))
        seen.add(run.id)
        if run.model not in known_models():
            known = ", ".join(sorted(known_models()))
            issues.append(Issue(f"/runs/{place}/model", f"found {run.model!r}; must be one of {known}."))
    if issues:
        raise InvalidInput(issues)
    return runs


@cache
def known_models() -> dict[str, Section]:
    """The section ``model`` of presets and of the models that only runs name."""
    own = {name: each["model"] for name, each in json.loads(MODELS.read_text(encoding="utf-8")).items()}
    presets = {name: with_presets({}, [name], {}).get("model", {}) for name in preset_names()}
    return {name: model for name, model in presets.items() if model} | own


def cluster_of(run: MeasuredRun) -> Cluster:
    """The cluster of a run."""
    given = {"presets": [run.device]} if isinstance(run.device, str) else run.device
    section = {key: value for key, value in given.items() if key != "presets"}
    device = with_presets({"presets": given.get("presets", []), "device": section}, [], {})["device"]
    if run.network_gbit_s is not None:
        device["link_bandwidth"] = run.network_gbit_s / BITS * USEFUL_NETWORK
    for group in set(run.hides) - {"gradients", "pipeline"}:
        device[f"{group}_parallel_overlap"] = HIDDEN
    if run.blocking_launches:
        device["launch_time"] = LAUNCH_TIME
    nodes = max(1, run.devices // run.devices_per_node)
    return equal_cluster({"nodes": nodes, "gpus_per_node": run.devices_per_node, "device": device})


def model_of(run: MeasuredRun) -> Transformer:
    """The model of a run."""
    own = {"sequence": run.sequence, "microbatch_size": run.microbatch_size}
    narrow = {"fp8": "fp8", "fp4": "fp4"}.get(run.precision or "")
    dtype = {"fp16": "float16", None: None}.get(run.precision, "bfloat16")
    section = {**known_models()[run.model], **run.sizes, **own, "product_dtype": narrow}
    if dtype is not None:
        section["dtype"] = dtype
    return validated(Transformer, section)
