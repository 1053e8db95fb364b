"""The section ``parallel`` of a configuration."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag
from zbv_solver.problem.layer_letters import Recomputed
from zbv_solver.problem.limits import MAX_CELLS, MAX_PP_DEGREE

from zbv_models.estimate.config_fields import Amount, ConfigSection, Flag, Share, Size


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
    optimizer: Optimizer = "adam"
    precision: PrecisionChoice | None = Field(
        None, description="a name or bytes of each kind; null: by the type of the model"
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
    fused_gradients: Flag = Field(
        True, description="products of W add their results to the accumulated gradients; false: a kernel does"
    )
    granularity: Literal["block", "half"] = Field("block", description="half: attention and MLP apart")
