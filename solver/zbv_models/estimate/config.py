"""The configuration of an estimate: a model, its parallelism, and a device; and its problem by layers.

The objects are parsed from JSON and frozen. Pydantic checks types and ranges, and :func:`parse_config` checks
the rules between several numbers. An :class:`EstimateConfig` that it returns is valid.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag
from zbv_solver.documents.files import number
from zbv_solver.documents.validation import quoted, validated
from zbv_solver.errors import InvalidInput, Issue
from zbv_solver.problem.cut import Link
from zbv_solver.problem.layer import Recomputed
from zbv_solver.problem.numeric import MAX_CELLS, MAX_LAYERS, MAX_PP_DEGREE

from zbv_models.estimate.device import Device
from zbv_models.estimate.layers import (
    LayerEstimate,
    ModelEstimate,
    Training,
    estimate_model,
    kept_together,
)
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.model_rules import degree_issues, frozen_issues, model_issues
from zbv_models.estimate.replica import Running
from zbv_models.estimate.sections import Amount, ConfigSection, Flag, Share, Size
from zbv_models.estimate.shapes import Degrees
from zbv_models.estimate.states import StateBytes


class Precision(ConfigSection):
    """Bytes per parameter of each kind of training state; ``state`` once per state of the optimizer."""

    parameters: Amount
    gradients: Amount
    master: Amount = Field(description="copy of the parameters that the optimizer works on")
    state: Amount = Field(description="each of the values that the optimizer keeps")
    gathered: Amount = Field(0, description="parameters as FSDP gathers them; 0: as parameters")


PRECISIONS = {
    "mixed": Precision(parameters=2, gradients=2, master=4, state=4),
    "mixed-fp32-gradients": Precision(parameters=2, gradients=4, master=4, state=4),
    "bf16-states": Precision(parameters=2, gradients=4, master=4, state=2),
    "fp8-states": Precision(parameters=2, gradients=4, master=4, state=1),
    "float8-gather": Precision(parameters=2, gradients=4, master=4, state=4, gathered=1),
    "single": Precision(parameters=4, gradients=4, master=0, state=4),
    "half": Precision(parameters=2, gradients=2, master=0, state=2),
}
"""``mixed``: Rajbhandari et al. 2020, §3.1. ``bf16-states``: DeepSeek-AI 2024b, §3.3.2."""
PRECISION_OF = {"bfloat16": "mixed-fp32-gradients", "float16": "mixed", "float32": "single"}
"""The precision of a model's type, if none is given: that of Megatron-LM with ``--bf16`` and ``--fp16``."""
Pairs = Literal["none", "experts", "all"]
CopiesChoice = Literal["none", "activations"]
PrecisionName = Literal[
    "mixed", "mixed-fp32-gradients", "bf16-states", "fp8-states", "float8-gather", "single", "half"
]
Optimizer = Literal["adam", "muon", "lion", "sgd-momentum", "sgd"]


def _name_or_bytes(value: Any) -> str:
    return "name" if isinstance(value, str) else "bytes"


PrecisionChoice = Annotated[
    Annotated[PrecisionName, Tag("name")] | Annotated[Precision, Tag("bytes")],
    Discriminator(_name_or_bytes),
]


class ParallelConfig(ConfigSection):
    """How the model is distributed over devices, and what training keeps."""

    pp_degree: Size = Field(le=MAX_PP_DEGREE, description="pipeline ranks, p")
    microbatches: Size = Field(le=MAX_CELLS, description="per step and replica, m")
    placement: Literal["auto", "v", "loop", "single"] | None = Field(
        None, description="null: v with tied embeddings, which V brings to one rank, else auto"
    )
    chunks: Size | None = Field(None, le=64, description="stages per rank; only for placement loop")
    objective: Literal["span", "makespan"] = Field("span", description="what the plan minimises")
    tensor_parallel: Size = Field(1, description="devices that share every layer, t")
    sequence_parallel: Flag = Field(False, description="they share norms and dropout, too, by sequence")
    context_parallel: Size = Field(1, description="devices that share every sequence, c")
    context_exchange: Literal["ring", "all-gather"] = Field(
        "ring", description="how they exchange keys and values"
    )
    expert_parallel: Size = Field(1, description="devices that share the experts of a block")
    expert_parallel_in_node: Size = Field(1, description="of these, devices on one node")
    data_parallel: Size = Field(1, description="replicas of the pipeline, d")
    zero_stage: Annotated[int, Field(strict=True, ge=0, le=3)] = Field(
        0, description="replicas share optimizer states (1), gradients (2), parameters (3)"
    )
    optimizer: Optimizer = Field("adam", description="which states the optimizer has")
    precision: PrecisionChoice | None = Field(
        None, description="bytes per parameter of each state, or their name; null: by the type of the model"
    )
    offloaded_states: Share = Field(
        0.0, description="share of the optimizer's states and master copy that the host keeps and updates"
    )
    recompute: Literal["none", "selective", "full"] | None = Field(
        None, description="the alternative that layers carry; null: selective for plain attention, else full"
    )
    recompute_modules: tuple[Recomputed, ...] = Field(
        ("core_attn",),
        description="what selective recomputation repeats: Megatron-LM's modules, or op (torchtitan)",
    )
    pairs: Pairs = Field(
        "none",
        description="what a forward and a backward that run together hide of each other: the all-to-all of "
        "experts, or all collectives of a microbatch",
    )
    copies: CopiesChoice = Field(
        "none", description="what a plan may copy to the host between an F and its backward"
    )
    fused_gradients: Flag = Field(
        True, description="products of W add their results to the accumulated gradients; false: a kernel does"
    )
    granularity: Literal["block", "half"] = Field("block", description="half: attention and MLP apart")


class EstimateConfig(ConfigSection):
    """A complete configuration; made by :func:`parse_config`."""

    model: Transformer
    parallel: ParallelConfig
    device: Device

    @property
    def precision(self) -> Precision:
        """Bytes per parameter."""
        chosen = self.parallel.precision
        if isinstance(chosen, Precision):
            return chosen
        return PRECISIONS[chosen or PRECISION_OF[self.model.dtype]]

    @property
    def state(self) -> StateBytes:
        """The states of training."""
        return StateBytes(
            **self.precision.model_dump(),
            optimizer=self.parallel.optimizer,
            dtype=self.model.dtype,
            offloaded=self.parallel.offloaded_states,
        )

    @property
    def degrees(self) -> Degrees:
        """How many devices share what."""
        parallel = self.parallel
        return Degrees(
            parallel.tensor_parallel,
            parallel.sequence_parallel,
            parallel.context_parallel,
            parallel.context_exchange == "all-gather",
            parallel.expert_parallel,
            parallel.expert_parallel_in_node,
            parallel.data_parallel,
            parallel.zero_stage,
        )

    @property
    def training(self) -> Training:
        """What training keeps, and how it is planned."""
        return Training(
            state=self.state,
            modules=frozenset(self.parallel.recompute_modules),
            ends_share_rank=self.placement == "v" or self.parallel.pp_degree == 1,
            by_halves=self.parallel.granularity == "half",
            fused_gradients=self.parallel.fused_gradients,
            pairs=self.parallel.pairs,
        )

    @property
    def recompute(self) -> str:
        """The recomputation that layers offer."""
        return self.parallel.recompute or ("selective" if self.model.attention == "plain" else "full")

    @property
    def placement(self) -> str:
        """The placement of the problem."""
        return self.parallel.placement or ("v" if self.model.tied_embeddings else "auto")


def parse_config(document: Any) -> EstimateConfig:
    """Parse a decoded JSON document with presets already merged.

    Raises :class:`InvalidInput` with one issue per broken rule; pointers are into the document.
    """
    config = validated(EstimateConfig, document)
    issues = [
        *model_issues(config.model),
        *_count_issues(config.model, config.parallel),
        *degree_issues(config.model, config.degrees),
        *_device_issues(config.model, config.parallel, config.device),
    ]
    issues = issues or [*frozen_issues(config.model)]
    if issues:
        raise InvalidInput(issues)
    return config


def _count_issues(model: Transformer, parallel: ParallelConfig) -> Iterator[Issue]:
    """The layers, with the ends of the model, must not be more than a problem may have."""
    halves = 2 if parallel.granularity == "half" else 1
    predictions = model.prediction_layers * (3 if halves == 2 else 1)
    vision = 0 if model.vision is None else 2 + halves * model.vision.layers
    most = (MAX_LAYERS - 2 - predictions - vision) // halves
    if most < 1:  # no number of layers is small enough
        key, found = "prediction_layers", model.prediction_layers
        if model.vision is not None and vision > predictions:
            key, found = "vision/layers", model.vision.layers
        rule = f"together, with embedding and head, they must be at most {MAX_LAYERS}"
        yield Issue(
            "/model/layers", f"found {model.layers}, and {found} as {key}; {rule}. Use fewer of them."
        )
    elif model.layers > most:
        remedy = " Use granularity block." if halves == 2 else ""
        yield Issue("/model/layers", f"found {model.layers}; must be at most {most}.{remedy}")


def _device_issues(model: Transformer, parallel: ParallelConfig, device: Device) -> Iterator[Issue]:
    def needed(key: str, by: str, remedy: str) -> Iterator[Issue]:
        if getattr(device, key) is None:
            yield Issue(f"/device/{key}", f"this key is absent, and {by}. Give {remedy}.")

    inside = "the GB/s that a device sends within its group; with {}_parallel_overlap 1 they cost nothing"
    key = "tensor_parallel_bandwidth"
    if parallel.tensor_parallel > 1:
        by = f"tensor_parallel {parallel.tensor_parallel} needs it"
        yield from needed(key, by, inside.format("tensor"))
    if parallel.expert_parallel_in_node > 1:
        remedy = "the GB/s that a device sends inside its node"
        yield from needed(key, "expert_parallel_in_node needs it", remedy)
    for group in ("context", "expert"):
        degree = getattr(parallel, f"{group}_parallel")
        if degree > 1 and device.link_bandwidth is None:
            by = f"{group}_parallel {degree} needs it, or link_bandwidth"
            yield from needed(f"{group}_parallel_bandwidth", by, inside.format(group))
    narrow = model.narrow_dtype
    if narrow is None and model.product_dtype not in (None, model.dtype):
        rule = f"must be fp8, fp4 or the type of activations, dtype ({model.dtype})."
        yield Issue("/model/product_dtype", f"found {quoted(model.product_dtype)}; {rule}")
    if narrow is not None:
        yield from needed(f"{narrow}_tflops", f"product_dtype {narrow} needs it", "its TFLOP/s")
    precision = parallel.precision
    chosen = PRECISIONS[precision] if isinstance(precision, str) else precision
    if chosen is not None and chosen.gathered and narrow != "fp8":
        detail = "parameters gathered in float8 need linear layers in float8"
        yield Issue("/parallel/precision", f"{detail}. Set product_dtype fp8, or choose another precision.")
    if "op" in parallel.recompute_modules and (
        len(set(parallel.recompute_modules)) > 1
        or parallel.granularity != "block"
        or model.attention != "flash"
    ):
        detail = (
            "torchtitan's selective recomputation has no modules, and needs whole blocks with flash attention"
        )
        yield Issue("/parallel/recompute_modules", f"found op; {detail}. Name op alone, or leave it out.")
    is_core = set(parallel.recompute_modules) <= {"core_attn"}
    if parallel.recompute == "selective" and is_core and model.attention == "flash":
        yield Issue(
            "/parallel/recompute",
            "found 'selective'; it recomputes the scores that plain attention keeps, and flash keeps none. "
            "Use full or none, or give other recompute_modules.",
        )


BYTES_PER_MICROSECOND = 1e3
"""In a GB/s."""


def estimate_config(config: EstimateConfig) -> ModelEstimate:
    """The estimate of a configuration.

    Raises :class:`InvalidInput` if it asks for pairs that have nothing to hide.
    """
    found = estimate_model(
        config.model,
        config.degrees,
        config.device,
        config.device.links,
        config.training,
        config.model.microbatch_size,
    )
    pairs, device = config.parallel.pairs, config.device
    if pairs != "none" and not any(layer.plain.hidden.total for layer in found.layers):
        what = "all-to-all of experts" if pairs == "experts" else "collectives"
        remedy = f"Share experts (expert_parallel, found {config.parallel.expert_parallel})"
        if device.expert_parallel_overlap == 1:
            remedy = "Set expert_parallel_overlap, which is 1, to what compute hides without pairs, such as 0"
        detail = f"found {pairs}; no F or I waits for {what}. {remedy}, or leave out the pairs."
        raise InvalidInput.at("/parallel/pairs", detail)
    return found


def estimate_layers(config: EstimateConfig) -> tuple[LayerEstimate, ...]:
    """The layers of a configuration."""
    return estimate_config(config).layers


def problem_document(config: EstimateConfig, layers: Sequence[LayerEstimate] | None = None) -> dict[str, Any]:
    """The problem: microseconds and bytes, of one device of each rank."""
    parallel, device = config.parallel, config.device
    layers = layers or estimate_layers(config)
    document: dict[str, Any] = {
        "pp_degree": parallel.pp_degree,
        "microbatches": parallel.microbatches,
        "placement": config.placement,
        "objective": parallel.objective,
        "layers": [_layer(layer, config.recompute) for layer in layers],
        "costs": {"p2p": number(device.link_latency)},
        "memory": {"static": number(device.reserved), "limit": None},
        "units": {"time": "us", "memory": "bytes"},
    }
    if config.recompute == "selective":
        document["recompute_modules"] = list(parallel.recompute_modules)
    if together := kept_together(config.model, layers, config.training.ends_share_rank):
        document["cut"] = {"together": [list(names) for names in together]}
    if parallel.chunks is not None:
        document["chunks"] = parallel.chunks
    if device.link_bandwidth is not None:
        bandwidth = number(device.link_bandwidth * BYTES_PER_MICROSECOND)
        document["costs"] = {"link": {"latency": number(device.link_latency), "bandwidth": bandwidth}}
    if parallel.pairs != "none":
        document["costs"]["pair_factor"] = _shortened(device.cost_of_pairs)
    if (host := host_link(parallel.copies, device)) is not None:
        document["costs"]["host_link"] = {key: number(value) for key, value in vars(host).items()}
    if device.memory_limit is not None:
        document["memory"]["limit"] = number(device.memory_limit)
    return document


def host_link(copies: CopiesChoice, device: Device, at: str = "/device") -> Link | None:
    """The link to a device's host, in microseconds and bytes; None if nothing may be copied.

    Raises :class:`InvalidInput` if it is unknown.
    """
    if copies == "none":
        return None
    if device.host_bandwidth is None:
        detail = "this key is absent, so it is unknown how long a copy takes. Give it, or leave out copies."
        raise InvalidInput.at(f"{at}/host_bandwidth", detail)
    return Link(device.host_latency, device.host_bandwidth * BYTES_PER_MICROSECOND)


def _layer(layer: LayerEstimate, recompute: str) -> dict[str, Any]:
    static = number(layer.static.total)
    document: dict[str, Any] = {"name": layer.name, **_costs(layer.plain, static)}
    document["parameters_bytes"] = number(layer.static.parameters)
    document["output_bytes"] = layer.output_bytes
    if layer.repeat is not None:
        document["repeat"] = layer.repeat
    if (again := layer.recomputed(recompute)) is not None:
        document["recompute"] = _costs(again, static)
    return document


def _costs(running: Running, static: float) -> dict[str, Any]:
    times, hidden = running.times, running.hidden
    communication = {
        "forward": _shortened(hidden.forward),
        "backward_input": _shortened(hidden.backward_input),
        "backward": _shortened(hidden.backward_input),
    }
    return {
        "forward": _shortened(times.forward),
        "backward_input": _shortened(times.backward_input),
        "backward_weight": _shortened(times.backward_weight),
        **({"communication": communication} if hidden.total else {}),
        "memory": {
            "forward": running.after_forward,
            "backward_input": running.after_input - running.after_forward,
            "backward_weight": -running.after_input,
            "static": static,
            "workspace": running.workspace,
        },
    }


def _shortened(microseconds: float) -> float | int:
    """Six digits: more of them would be those of the formula, not of the machine."""
    return number(float(f"{microseconds:.6g}"))
