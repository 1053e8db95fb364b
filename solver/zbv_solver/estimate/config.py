"""The configuration of an estimate: a model, its parallelism, and a device.

The objects are parsed from JSON and frozen. Pydantic checks types and ranges, and :func:`parse_config` checks
the rules between several numbers. An :class:`EstimateConfig` that it returns is valid.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from zbv_solver.documents.validation import validated
from zbv_solver.errors import InvalidInput, Issue
from zbv_solver.problem.limits import MAX_CELLS, MAX_LAYERS, MAX_PP_DEGREE
from zbv_solver.problem.problem import Objective

Size = Annotated[int, Field(strict=True, ge=1, le=100_000_000)]
Flag = Annotated[bool, Field(strict=True)]
Amount = Annotated[float, Field(strict=True, ge=0, le=1e15, allow_inf_nan=False)]
Rate = Annotated[float, Field(strict=True, gt=0, le=1e9, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

OPTIMIZER_STATES = {"adam": 2, "lion": 1, "sgd-momentum": 1, "sgd": 0}
"""Values that an optimizer keeps per parameter, in addition to a master copy."""


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(_Config):
    """A decoder-only transformer, and the size of its microbatches.

    Widths are those of the whole model, before tensor parallelism divides them (:class:`ParallelConfig`).
    """

    hidden: Size = Field(description="width of the residual stream, h")
    layers: Size = Field(description="transformer blocks, L")
    heads: Size = Field(description="query heads, a")
    kv_heads: Size | None = Field(None, description="key and value heads; null: as many as query heads")
    head_dim: Size | None = Field(None, description="width of a head; null: hidden / heads")
    ffn: Size | None = Field(None, description="width of the MLP between its matrices; null: 4 hidden")
    gated: Flag = Field(False, description="MLP with a gate: three matrices, as in SwiGLU")
    vocabulary: Size = Field(description="tokens of the vocabulary, as padded, V")
    tied_embeddings: Flag = Field(False, description="the head has the weights of the embedding")
    sequence: Size = Field(description="tokens per sequence, s")
    microbatch_size: Size = Field(1, description="sequences per microbatch, b")
    dtype: Literal["bfloat16", "float16", "float32"] = Field("bfloat16", description="type of activations")
    attention: Literal["flash", "plain"] = Field(
        "flash",
        description="flash keeps no scores; plain keeps them, for softmax and the product with values",
    )
    causal: Flag = Field(True, description="flash leaves out the half of the scores that is masked")
    dropout: Flag = Field(
        False, description="dropout after embedding, attention and MLP, and of plain scores"
    )
    norm: Literal["layernorm", "rmsnorm"] = Field("layernorm", description="the two norms of a block")
    bias: Flag = Field(True, description="linear layers of blocks have biases")
    qkv_bias: Flag | None = Field(None, description="that of queries, keys and values; null: as bias")
    qk_norm: Flag = Field(False, description="queries and keys are normalised per head")
    positions: Literal["learned", "rotary", "none"] = Field("learned", description="position embedding")
    fused_activation: Flag = Field(
        True, description="gate and activation are one kernel, which keeps its inputs alone"
    )

    @property
    def query_width(self) -> int:
        """Width of all query heads."""
        return self.heads * self.width_of_head

    @property
    def kv_width(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.n_kv_heads * self.width_of_head

    @property
    def n_kv_heads(self) -> int:
        """Key and value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def width_of_head(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def ffn_width(self) -> int:
        """Width of the MLP between its matrices."""
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the projection to queries, keys and values has a bias."""
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def tokens(self) -> int:
        """Tokens per microbatch."""
        return self.sequence * self.microbatch_size

    @property
    def dtype_bytes(self) -> int:
        """Bytes per value of an activation."""
        return DTYPE_BYTES[self.dtype]


class Precision(_Config):
    """Bytes per parameter of each kind of training state; ``state`` once per state of the optimizer."""

    parameters: Amount
    gradients: Amount
    master: Amount = Field(description="copy of the parameters that the optimizer works on")
    state: Amount = Field(description="each of the values that the optimizer keeps")


PRECISIONS = {
    "mixed": Precision(parameters=2, gradients=2, master=4, state=4),
    "mixed-fp32-gradients": Precision(parameters=2, gradients=4, master=4, state=4),
    "single": Precision(parameters=4, gradients=4, master=0, state=4),
    "half": Precision(parameters=2, gradients=2, master=0, state=2),
}
"""``mixed``: Rajbhandari et al. 2020, §3.1. ``mixed-fp32-gradients``: as Megatron-LM accumulates them."""


def _name_or_bytes(value: Any) -> str:
    return "name" if isinstance(value, str) else "bytes"


PrecisionChoice = Annotated[
    Annotated[Literal["mixed", "mixed-fp32-gradients", "single", "half"], Tag("name")]
    | Annotated[Precision, Tag("bytes")],
    Discriminator(_name_or_bytes),
]


class ParallelConfig(_Config):
    """How the model is distributed over devices, and what training keeps."""

    pp_degree: Size = Field(le=MAX_PP_DEGREE, description="pipeline ranks, p")
    microbatches: Size = Field(le=MAX_CELLS, description="per step and replica, m")
    placement: Literal["auto", "v", "loop", "single"] | None = Field(
        None, description="null: v with tied embeddings, which V brings to one rank, else auto"
    )
    chunks: Size | None = Field(None, le=64, description="stages per rank; only for placement loop")
    objective: Objective = Field("span", description="what the plan minimises")
    tensor_parallel: Size = Field(1, description="devices that share every layer, t")
    sequence_parallel: Flag = Field(False, description="they share norms and dropout, too, by sequence")
    data_parallel: Size = Field(1, description="replicas of the pipeline, d")
    zero_stage: Annotated[int, Field(strict=True, ge=0, le=3)] = Field(
        0, description="replicas share optimizer states (1), gradients (2), parameters (3)"
    )
    optimizer: Literal["adam", "lion", "sgd-momentum", "sgd"] = "adam"
    precision: PrecisionChoice | None = Field(
        None, description="a name or bytes of each kind; null: single for float32, else mixed"
    )
    recompute: Literal["none", "selective", "full"] | None = Field(
        None, description="the alternative that layers carry; null: selective for plain attention, else full"
    )
    granularity: Literal["block", "half"] = Field("block", description="half: attention and MLP apart")


class DeviceConfig(_Config):
    """What a device and its links achieve in practice, as opposed to their specifications."""

    achieved_tflops: Rate = Field(description="TFLOP/s of matrix products")
    memory_bandwidth: Rate | None = Field(
        None, description="GB/s of norms, softmax and the like; null: they take no time of their own"
    )
    link_bandwidth: Rate | None = Field(None, description="GB/s between pipeline ranks; null: no limit")
    link_latency: Amount = Field(0.0, description="us, of every transfer between pipeline ranks")
    tensor_parallel_bandwidth: Rate | None = Field(
        None, description="GB/s that a device sends within its tensor-parallel group"
    )
    tensor_parallel_latency: Amount = Field(0.0, description="us, of every collective of that group")
    tensor_parallel_overlap: Share = Field(0.0, description="share of those collectives that compute hides")
    memory_limit: Amount | None = Field(None, description="bytes; null: no limit")
    reserved: Amount = Field(0.0, description="bytes that a device needs in addition to the layers")


class EstimateConfig(_Config):
    """A complete configuration; made by :func:`parse_config`."""

    model: ModelConfig
    parallel: ParallelConfig
    device: DeviceConfig

    @property
    def precision(self) -> Precision:
        """Bytes per parameter."""
        chosen = self.parallel.precision
        if isinstance(chosen, Precision):
            return chosen
        return PRECISIONS[chosen or ("single" if self.model.dtype == "float32" else "mixed")]

    @property
    def optimizer_states(self) -> int:
        """Values that the optimizer keeps per parameter."""
        return OPTIMIZER_STATES[self.parallel.optimizer]

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

    Raises
    ------
    InvalidInput
        With one issue per broken rule; pointers are into the document.
    """
    config = validated(EstimateConfig, document)
    issues = [*_model_issues(config.model), *_count_issues(config), *_parallel_issues(config)]
    if issues:
        raise InvalidInput(issues)
    return config


def _model_issues(model: ModelConfig) -> Iterator[Issue]:
    if model.head_dim is None and model.hidden % model.heads:
        rule = f"must divide hidden ({model.hidden}). Or give head_dim, their width."
        yield Issue("/model/heads", f"found {model.heads}; {rule}")
    if model.heads % model.n_kv_heads:
        rule = f"must divide heads ({model.heads}): each serves as many of them."
        yield Issue("/model/kv_heads", f"found {model.kv_heads}; {rule}")


def _count_issues(config: EstimateConfig) -> Iterator[Issue]:
    """The layers, with embedding and head, must not be more than a problem may have."""
    layers, halves = config.model.layers, 2 if config.parallel.granularity == "half" else 1
    most = (MAX_LAYERS - 2) // halves
    if layers > most:
        remedy = " Use granularity block." if halves == 2 else ""
        yield Issue("/model/layers", f"found {layers}; must be at most {most}.{remedy}")


def _parallel_issues(config: EstimateConfig) -> Iterator[Issue]:
    model, parallel, device = config.model, config.parallel, config.device
    degree = parallel.tensor_parallel
    divided = {
        "heads": model.heads,
        "kv_heads": model.n_kv_heads,
        "ffn": model.ffn_width,
        "vocabulary": model.vocabulary,
    }
    if parallel.sequence_parallel:
        divided["sequence"] = model.sequence
    for name, size in divided.items():
        if size % degree:
            padded = f" Pad it to {-(-size // degree) * degree}." if name == "vocabulary" else ""
            rule = f"found {degree}; must divide {name} ({size}).{padded}"
            yield Issue("/parallel/tensor_parallel", rule)
    if degree > 1 and device.tensor_parallel_bandwidth is None:
        yield Issue(
            "/device/tensor_parallel_bandwidth",
            f"this key is absent, and tensor_parallel {degree} needs it. Give the GB/s that a device sends "
            f"within its group; with tensor_parallel_overlap 1 they cost nothing.",
        )
    if parallel.recompute == "selective" and model.attention == "flash":
        yield Issue(
            "/parallel/recompute",
            "found 'selective'; it recomputes the scores that plain attention keeps, and flash keeps none. "
            "Use full or none.",
        )
