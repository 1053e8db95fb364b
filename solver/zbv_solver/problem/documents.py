"""The shape of problem documents, by stages and by layers (docs/formats.md), and of request bodies.

A document may be short: one number stands for all stages or ranks, and absent keys for the values of a
layer. :mod:`.reading` makes the records in full that the planner knows, which check all rules between
numbers. What documents cannot shorten, such as a :class:`.Link`, is the same class in both.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from zbv_solver.documents.fields import MAX_NAME, TOO_MANY, AtMost, Count, Document, Flag, Name, Number
from zbv_solver.problem.cut import CutRules, Link
from zbv_solver.problem.layer import Recomputed
from zbv_solver.problem.numeric import (
    MAX_CELLS,
    MAX_CHUNKS,
    MAX_DEVICES,
    MAX_LAYERS,
    MAX_PP_DEGREE,
    MAX_STAGES,
)
from zbv_solver.problem.problem import Objective, Units
from zbv_solver.problem.stages import MAX_FEATURE_NAME, MAX_FEATURES, PlacementKind


def _list_or_one(value: Any) -> str:
    return "list" if isinstance(value, list | tuple) else "one"


def _shape_of_number(value: Any) -> str:
    if isinstance(value, dict):
        return "features"
    return "list" if isinstance(value, list | tuple) else "number"


NumberOrList = Annotated[
    Annotated[Number, Tag("number")] | Annotated[list[Number], AtMost(MAX_STAGES), Tag("list")],
    Discriminator(
        _shape_of_number,
        custom_error_type="no_features",
        custom_error_message="must be a number or a list of numbers, not an object",
    ),
]
"""A scalar, one value per chunk, or one per stage."""
FeatureName = Annotated[str, Field(min_length=1, max_length=MAX_FEATURE_NAME)]
Amount = Annotated[
    Annotated[Number, Tag("number")]
    | Annotated[list[Number], AtMost(MAX_STAGES), Tag("list")]
    | Annotated[dict[FeatureName, NumberOrList], Field(max_length=MAX_FEATURES + 1), Tag("features")],
    Discriminator(_shape_of_number),
]
"""A number that may depend on the microbatch: its fixed part, and coefficients of features, by name."""


class CommunicationDocument(Document):
    """Times that the other action of a pair can hide, at most those of the actions; in the caller's unit."""

    forward: Amount = 0.0
    backward_input: Amount = 0.0
    backward: Amount = Field(0.0, description="Of the fused backward.")


class CostsDocument(Document):
    """Durations in the caller's time unit: a scalar, one per chunk, or one per stage in model order.

    An object `{"fixed": …, "<feature>": …}` makes a duration depend on the microbatch.
    """

    forward: Amount
    backward_input: Amount
    backward_weight: Amount
    backward: Amount | None = Field(None, description="Fused backward; null means I + W.")
    p2p: Amount = Field(0.0, description="Latency of a stage boundary: a scalar, or one per boundary.")
    communication: CommunicationDocument | None = Field(
        None, description="Of a forward and a backward that may run as a pair; absent: there are no pairs."
    )
    pair_factor: Number = Field(
        1.0, description="What the two actions of a pair cost each other, at least 1."
    )
    offload: NumberOrList | None = Field(
        None, description="Time to copy what an F keeps to the host; absent: nothing is copied."
    )
    reload: NumberOrList | None = Field(None, description="Time to copy it back; null means `offload`.")


class MemoryDocument(Document):
    """Memory deltas (scalar, per chunk, or per stage); static use and limit (scalar or per rank).

    An object `{"fixed": …, "<feature>": …}` makes a delta depend on the microbatch.
    """

    forward: Amount
    backward_input: Amount
    backward_weight: Amount
    static: NumberOrList = 0.0
    limit: NumberOrList | None = Field(None, description="null means unlimited.")
    offloadable: NumberOrList | None = Field(
        None, description="How much of `forward` a copy to the host frees; null means all of it."
    )
    host_limit: NumberOrList | None = Field(
        None, description="Memory of the host for copies, a scalar or per rank; null means unlimited."
    )


Measured = Annotated[
    dict[Annotated[str, Field(max_length=32)], Annotated[str, Field(max_length=MAX_NAME)]],
    Field(max_length=32, description="The program whose costs were measured: names and values."),
]


PerMicrobatch = Annotated[list[Number], AtMost(MAX_CELLS)]
Features = Annotated[
    dict[FeatureName, PerMicrobatch],
    Field(
        max_length=MAX_FEATURES,
        description="Numbers that differ between microbatches, one per microbatch, by name.",
    ),
]
Sequences = Annotated[
    list[PerMicrobatch],
    AtMost(MAX_CELLS),
    Field(
        description="The lengths of every microbatch's sequences: short for the features `tokens` (their "
        "sum) and `tokens_squared` (the sum of their squares)."
    ),
]


_PpDegree = Annotated[int, Field(strict=True, ge=1, le=MAX_PP_DEGREE)]
_Microbatches = Annotated[int, Field(strict=True, ge=1, le=MAX_CELLS)]


class ProblemDocument(Document):
    """A planning problem."""

    pp_degree: _PpDegree
    microbatches: _Microbatches
    placement: PlacementKind = "v"
    chunks: Count | None = Field(None, le=MAX_CHUNKS, description="Stages per rank; only for placement loop.")
    objective: Objective = "span"
    costs: CostsDocument
    memory: MemoryDocument | None = None
    features: Features | None = None
    sequences: Sequences | None = None
    units: Units | None = None
    measured: Measured | None = None


# The name of a copy is a little longer than the layer's name.
_CopyName = Annotated[str, Field(max_length=MAX_NAME + 10)]
Partition = Annotated[list[Annotated[list[_CopyName], AtMost(MAX_LAYERS)]], AtMost(MAX_STAGES)]
"""Layer names of every stage."""


class LayerMemoryDocument(Document):
    """Memory of a layer: deltas, static memory, and workspace while it runs."""

    forward: Number = 0.0
    backward_input: Number = 0.0
    backward_weight: Number = 0.0
    static: Number | None = Field(None, description="Absent: parameters_bytes.")
    workspace: Number = 0.0


class LayerCommunicationDocument(Document):
    """What the other action of a pair can hide of a layer, at most the layer's times."""

    forward: Number = 0.0
    backward_input: Number = 0.0
    backward: Number = Field(0.0, description="Of the fused backward.")


class RecomputeDocument(Document):
    """Costs of a layer when its stage is recomputed; absent keys keep the layer's values."""

    forward: Number | None = None
    backward_input: Number | None = None
    backward_weight: Number | None = None
    backward: Number | None = Field(
        None, description="Absent: the layer's own fused backward plus the increase of I and W."
    )
    memory: LayerMemoryDocument | None = None
    communication: LayerCommunicationDocument | None = None


class OnDeviceDocument(RecomputeDocument):
    """Costs of a layer on another device; absent keys keep the layer's values."""

    recompute: RecomputeDocument | None = Field(
        None, description="Costs when the stage is recomputed; absent keys keep the values on this device."
    )


class LayerDocument(Document):
    """A layer, or `repeat` equal copies."""

    name: Name
    forward: Number
    backward_input: Number
    backward_weight: Number
    backward: Number | None = Field(None, description="Fused backward; null means I + W.")
    memory: LayerMemoryDocument | None = None
    communication: LayerCommunicationDocument | None = Field(
        None, description="Of a forward and a backward that may run as a pair."
    )
    parameters_bytes: Number = 0.0
    output_bytes: Number = 0.0
    repeat: Count | None = None
    recompute: RecomputeDocument | None = None
    on: Annotated[dict[Name, OnDeviceDocument], Field(max_length=MAX_DEVICES)] | None = Field(
        None, description="Costs on devices where they differ, by the names in `devices`."
    )


class StageCommunicationDocument(Document):
    """The communication of a partition's stages, which is that of their layers."""

    forward: NumberOrList | None = None
    backward_input: NumberOrList | None = None
    backward: NumberOrList | None = None


class LayeredCostsDocument(Document):
    """Costs of transfers and copies; with a partition, also the costs of its stages."""

    p2p: NumberOrList | None = None
    link: (
        Annotated[
            Annotated[Link, Tag("one")] | Annotated[list[Link], AtMost(MAX_PP_DEGREE), Tag("list")],
            Discriminator(_list_or_one),
        ]
        | None
    ) = Field(None, description="One link, or one per rank: to the next rank, from the last to the first.")
    blocking: bool = Field(
        False,
        description="Whether transfers keep both ranks waiting, as in 1F1B of Megatron-LM, instead of "
        "overlapping with their actions. The costs of stages then include them.",
    )
    host_link: Link | None = Field(
        None, description="Between a device and its host: all that an F keeps may be copied. Absent: nothing."
    )
    forward: NumberOrList | None = None
    backward_input: NumberOrList | None = None
    backward_weight: NumberOrList | None = None
    backward: NumberOrList | None = None
    communication: StageCommunicationDocument | None = None
    pair_factor: Number = Field(
        1.0, description="What the two actions of a pair cost each other, at least 1."
    )
    offload: NumberOrList | None = None
    reload: NumberOrList | None = None


class LayeredMemoryDocument(Document):
    """Limit and static memory in addition to the layers'; with a partition, also the deltas of its stages."""

    static: NumberOrList = 0.0
    limit: NumberOrList | None = Field(None, description="null means unlimited.")
    static_beside_layers: NumberOrList | None = Field(
        None, description="In a plan's problem, where `static` includes the layers."
    )
    host_limit: NumberOrList | None = Field(
        None, description="Memory of the host for copies, a scalar or per rank; null means unlimited."
    )
    forward: NumberOrList | None = None
    backward_input: NumberOrList | None = None
    backward_weight: NumberOrList | None = None
    offloadable: NumberOrList | None = None


def _refuse_features(value: Any) -> None:
    if value is not None:
        raise PydanticCustomError(
            TOO_MANY,
            "layers are the same for every microbatch; plan the layers without this key, then give the "
            "stages of the plan with costs that depend on features",
        )


_NotOfLayers = SkipJsonSchema[Annotated[None, BeforeValidator(_refuse_features)]]
"""A key of problems by stages that has its own message in one by layers."""


MOST_GROUPS = 64
"""Most sizes of groups in a profile."""
Size = Annotated[int, Field(strict=True, ge=1, le=100_000_000)]
Duration = Annotated[float, Field(strict=True, ge=0, le=1e15, allow_inf_nan=False)]
Rate = Annotated[float, Field(strict=True, gt=0, le=1e15, allow_inf_nan=False)]


class AllReduceDocument(Document):
    """All-reduces of a group of ranks: a time of ``latency + sent / bandwidth``.

    A rank of n sends 2 (n - 1) / n of the tensor.
    """

    ranks: Annotated[int, Field(strict=True, ge=2, le=100_000)]
    latency: Duration
    bandwidth: Rate = Field(description="memory units that a rank sends per time unit")


class ProfileDocument(Document):
    """The conditions of measured layers, and what they cost per step, in the problem's units.

    Planning ignores it; ``zbv layout --profile`` uses it.
    """

    microbatch_size: Size = Field(description="sequences per microbatch")
    sequence_length: Size = Field(description="tokens per sequence")
    tensor_parallel: Size = Field(1, description="devices that share every layer")
    update: Annotated[dict[Name, Duration], Field(max_length=MAX_LAYERS)] = Field(
        default_factory=dict, description="time of the optimizer's step, by layer"
    )
    all_reduce: Annotated[list[AllReduceDocument], AtMost(MOST_GROUPS)] = Field(default_factory=list)
    scatter_gather: Annotated[list[AllReduceDocument], AtMost(MOST_GROUPS)] = Field(
        default_factory=list, description="a reduce-scatter and an all-gather, which send as much together"
    )


class LayeredProblemDocument(Document):
    """A planning problem given by layers."""

    pp_degree: _PpDegree
    microbatches: _Microbatches
    placement: Literal["auto", "v", "loop", "single"] = "v"
    chunks: Count | None = Field(None, le=MAX_CHUNKS, description="Stages per rank; only for placement loop.")
    objective: Objective = "span"
    layers: Annotated[list[LayerDocument], AtMost(MAX_LAYERS)]
    devices: Annotated[list[Name], AtMost(MAX_PP_DEGREE)] | None = Field(
        None, description="Kind of device of every rank; absent: all ranks are alike."
    )
    costs: LayeredCostsDocument | None = None
    memory: LayeredMemoryDocument | None = None
    cut: CutRules | None = None
    units: Units | None = None
    measured: Measured | None = None
    profile: ProfileDocument | None = Field(None, description="Of measured layers; planning ignores it.")
    partition: Partition | None = Field(None, description="Layer names of every stage, if the cut is given.")
    recompute: Annotated[list[Flag], AtMost(MAX_STAGES)] | None = Field(
        None, description="Which stages of the partition are recomputed."
    )
    recompute_modules: Annotated[list[Recomputed], AtMost(len(get_args(Recomputed)))] | None = Field(
        None,
        description="What recomputed layers repeat: Megatron-LM's modules, or op (torchtitan); absent: all.",
    )
    features: _NotOfLayers = None
    sequences: _NotOfLayers = None
