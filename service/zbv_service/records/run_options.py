"""What a run executes, and how: its model or script, and its options."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from zbv_solver.documents.fields import Number

from zbv_service.records.shared import RequestDocument

MAX_INTEGER = 2**31 - 1
MAX_REPLICAS = 4096
MAX_ACCUMULATED = 4096
DEFAULT_RETRIES, MAX_RETRIES = 3, 100

Positive = Annotated[int, Field(strict=True, ge=1, le=MAX_INTEGER)]


_ABSOLUTE = r"^/[^\x00-\x1f\x7f]*$"
_FACTORY = r"^([A-Za-z_][\w.]*:[A-Za-z_]\w*|transformers:/[^\s:]+)$"


class ModelDocument(RequestDocument):
    """The model to train; all nodes must have it and allow it."""

    factory: Annotated[str, Field(max_length=300, pattern=_FACTORY)] = Field(
        description="package.module:factory, or transformers:PATH of a folder on the nodes"
    )
    arguments: dict[str, Any] = Field({}, description="Keyword arguments of the factory.")
    seed: Annotated[int, Field(strict=True, ge=0, le=MAX_INTEGER)] = 0


class ScriptDocument(RequestDocument):
    """A Python script that each rank runs; all nodes must have it and allow it."""

    path: Annotated[str, Field(max_length=1000, pattern=_ABSOLUTE)] = Field(
        description="The absolute path of the script on every node, such as /shared/train.py."
    )
    arguments: Annotated[list[str], Field(max_length=1000)] = Field(
        [], description="Command-line arguments. Everyone who may read the run can read them."
    )


def _require_absolute(directory: str) -> str:
    if re.fullmatch(_ABSOLUTE, directory) is None:
        name = re.sub(r"[^\w.-]", "", directory.rpartition("/")[2]) or "run"
        raise ValueError(
            f"must be an absolute path, without control characters, that all nodes share, such as "
            f"/shared/{name}"
        )
    if ".." in directory.split("/"):
        raise ValueError("must not contain '..': no node allows a directory that it does not name plainly")
    return directory


class CheckpointDocument(RequestDocument):
    """Where and how often the ranks save checkpoints."""

    directory: Annotated[
        str,
        Field(max_length=4000, json_schema_extra={"pattern": _ABSOLUTE}),
        AfterValidator(_require_absolute),
    ] = Field(description="An absolute path that all nodes share: a rank may resume on another node.")
    every: Positive = Field(description="Steps between two checkpoints.")
    timeout: Annotated[Number, Field(gt=0, le=86_400)] = Field(
        600.0, description="Longest wait for the slowest rank's file, in seconds."
    )
    sync: Annotated[bool, Field(strict=True)] = Field(
        False,
        description="Wait until each checkpoint is written; false writes it in the background, from a copy "
        "of the state in host memory.",
    )


OF_SCRIPTS = frozenset({"threads", "data_parallel", "retries"})
"""The options that have an effect on a run of a script."""


class RunOptionsDocument(RequestDocument):
    """How the ranks run. Of these options, a run of a script has only threads, data_parallel and retries."""

    def of_training(self) -> list[str]:
        """The options with other values than the defaults that have no effect on a script."""
        fields = type(self).model_fields
        return [
            name
            for name, field in fields.items()
            if name not in OF_SCRIPTS and getattr(self, name) != field.default
        ]

    backend: Literal["gloo", "nccl"] = Field("gloo", description="gloo: CPU; nccl: CUDA.")
    timeout: Annotated[Number, Field(gt=0, le=86_400)] = Field(
        120.0, description="Longest wait for a tensor, in seconds."
    )
    startup_timeout: Annotated[Number, Field(gt=0, le=86_400)] = Field(
        1800.0,
        description="Longest wait, in seconds, for the other ranks to start and connect, and for a tensor in "
        "a plan's first step, when ranks may compile.",
    )
    threads: Annotated[int, Field(strict=True, ge=1, le=1024)] | None = Field(
        None, description="Compute threads per rank on CPU; null divides a host's cores among its ranks."
    )
    data_parallel: Annotated[int, Field(strict=True, ge=1, le=MAX_REPLICAS)] = Field(
        1, description="Replicas of the pipeline, each with its own part of the data."
    )
    shard: Annotated[bool, Field(strict=True)] = Field(
        False,
        description="Divide parameters, gradients and optimizer state among the replicas, by rows; a stage's "
        "parameters are whole from its first action of a step to its last.",
    )
    precision: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Of the computation; parameters stay float32."
    )
    compile: Annotated[bool, Field(strict=True)] = Field(
        False, description="Compile every layer with torch.compile; not together with shard."
    )
    main_gradients: Annotated[bool, Field(strict=True)] = Field(
        True,
        description="Sum the gradients of parameters in half precision in float32, instead of in their own "
        "dtype.",
    )
    accumulate: Annotated[int, Field(strict=True, ge=1, le=MAX_ACCUMULATED)] = Field(
        1,
        description="How often a step runs the plan, each time on other microbatches, before the optimizer's "
        "step.",
    )
    clip_norm: Annotated[Number, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="Largest norm of the whole gradient; null does not clip."
    )
    non_finite: Literal["fail", "skip", "continue"] = Field(
        "fail",
        description="What to do with a step whose loss or gradients are not finite: fail ends the run with "
        "an error, skip leaves the step out on all ranks, continue goes on. Each is an event of the run.",
    )
    evaluate_every: Positive | None = Field(None, description="Steps between evaluations; null: never.")
    checkpoint: CheckpointDocument | None = Field(
        None, description="null saves nothing; a restarted run then begins with its first step."
    )
    retries: Annotated[int, Field(strict=True, ge=0, le=MAX_RETRIES)] = Field(
        DEFAULT_RETRIES, description="How often a failed run is restarted."
    )
    replan: Literal["auto", "ask", "off"] = Field(
        "off",
        description="If measured costs drift from planned ones: auto changes to a better plan, ask "
        "offers it, off does nothing.",
    )
    replan_threshold: Annotated[Number, Field(gt=0, allow_inf_nan=False)] = Field(
        0.05, description="Relative drift of a stage's costs or of the step that starts replanning."
    )
