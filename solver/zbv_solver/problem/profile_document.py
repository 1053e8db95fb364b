"""What a profile says besides the costs of layers: under which conditions, and what a step costs.

Planning ignores it; ``zbv layout --profile`` uses it (docs/formats.md, Profiles).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from zbv_solver.documents.fields import MAX_NAME, AtMost, Document
from zbv_solver.problem.limits import MAX_LAYERS

MOST_GROUPS = 64
"""Most sizes of groups in a profile."""
Size = Annotated[int, Field(strict=True, ge=1, le=100_000_000)]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
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
    """The conditions of measured layers, and what they cost per step, in the problem's units."""

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
