"""Requests for layouts: what ``zbv layout`` reads from its files and flags, as one document."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field
from zbv_models.estimate.config import CopiesChoice, Optimizer, Pairs, PrecisionName
from zbv_models.estimate.model import FrozenDtype, FrozenWord, LayerWord, TargetModule
from zbv_models.estimate.transformers_config import is_transformers_config
from zbv_models.layouts.cluster import parse_cluster
from zbv_models.layouts.executor_rules import FREE, require_runnable
from zbv_models.layouts.layout import MOST_LAYOUTS, MOST_LISTED, Fixed, LayoutFamily, Order, Recompute
from zbv_models.layouts.profile import Profile, parse_profile
from zbv_models.layouts.request import OF_MODEL, BatchConfig, Request, parse_request
from zbv_solver import __version__
from zbv_solver.documents.fields import MAX_NAME
from zbv_solver.documents.files import canonical_json
from zbv_solver.errors import InvalidInput, Issue
from zbv_solver.problem.layer import Recomputed
from zbv_solver.problem.numeric import MAX_LAYERS

from zbv_service.documents.parsing import parse_body
from zbv_service.documents.problems import pack, require_allowed
from zbv_service.records.searches import LayoutOptions, NewSearch
from zbv_service.records.shared import Name, RequestDocument
from zbv_service.settings import Settings

MAX_DEVICES = 65_536
MAX_BATCH = 65_536
"""Largest cluster and global batch: the number of layouts grows with their divisors."""
MAX_TOP = 20
MAX_PROFILES = 20
KEPT = ("precision", "optimizer", "recompute_modules", "pairs", "copies")
"""Keys that replace those of the model's section ``parallel``."""
Degree = Annotated[int, Field(strict=True, ge=1, le=MAX_DEVICES)] | None


class FixedParts(RequestDocument):
    """The parts of a layout that are given. The search chooses the others."""

    tensor_parallel: Degree = None
    context_parallel: Degree = None
    expert_parallel: Degree = None
    data_parallel: Degree = None
    pipeline_parallel: Degree = None
    microbatch_size: Annotated[int, Field(strict=True, ge=1, le=MAX_BATCH)] | None = None
    zero_stage: Annotated[int, Field(strict=True, ge=0, le=3)] | None = None
    recompute: Recompute | None = None
    recompute_layers: Annotated[int, Field(strict=True, ge=1, le=MAX_LAYERS)] | None = None
    placement: Order | None = None


class LayoutRequest(RequestDocument):
    """A model and a cluster to search the best layouts for; see `zbv layout`."""

    name: Name = None
    model: dict[str, Any] = Field(
        description="As `model.json` of `zbv layout`: sections `model` and `parallel`, names of `presets`, "
        "`global_batch` and `sequence_length`; or a `config.json` of transformers."
    )
    cluster: dict[str, Any] = Field(description="As `cluster.json` of `zbv layout`.")
    global_batch: Annotated[int, Field(strict=True, ge=1, le=MAX_BATCH)] | None = Field(
        None, description="Sequences per step; null: as the model says."
    )
    sequence_length: Annotated[int, Field(strict=True, ge=1)] | None = Field(
        None, description="Tokens per sequence; null: as the model says."
    )
    prediction_layers: Annotated[int, Field(strict=True, ge=0)] | None = Field(
        None, description="Modules of multi-token prediction, 0 for none; null: as the model says."
    )
    frozen: list[FrozenWord] | None = Field(
        None,
        description="Parts that do not train: all, layers or some of them as in 0-15, embedding, head, "
        "predictions, vision, projector; null: as the model says.",
    )
    frozen_dtype: FrozenDtype | None = Field(
        None, description="Type in which frozen blocks keep their matrices; null: as the model says."
    )
    lora_rank: Annotated[int, Field(strict=True, ge=1)] | None = Field(
        None, description="Rank of LoRA adapters in frozen layers; null: as the model says."
    )
    target_modules: list[TargetModule] | None = Field(
        None, description="Matrices with adapters, by their names or in groups; null: as the model says."
    )
    layers_to_transform: list[LayerWord] | None = Field(
        None, description="Layers with adapters, as in 0-15; null: as the model says."
    )
    precision: PrecisionName | None = Field(
        None, description="Bytes of parameters, gradients and optimizer states; null: as the model says."
    )
    optimizer: Optimizer | None = Field(
        None, description="Which states the optimizer has; null: as the model says."
    )
    recompute_modules: list[Recomputed] | None = Field(
        None, description="What selective recomputation repeats; null: as the model says, or what is best."
    )
    pairs: Pairs | None = Field(
        None,
        description="What a forward and a backward that run together hide of each other: the all-to-all of "
        "experts, or all collectives; null: as the model says.",
    )
    copies: CopiesChoice | None = Field(
        None,
        description="What plans may copy to the host between an F and its backward; null: as the model says.",
    )
    profiles: Annotated[list[dict[str, Any]], Field(max_length=MAX_PROFILES)] = Field(
        [], description="Problems of `zbv-worker profile`: measured layers replace estimates."
    )
    fixed: FixedParts = FixedParts()
    executor: Literal["zbv", "torch", "megatron", "torchtitan", "any"] = Field(
        "zbv", description="The program that runs the pipeline; all but zbv have fixed orders."
    )
    top: Annotated[int, Field(strict=True, ge=1, le=MAX_TOP)] = Field(1, description="Layouts to list.")
    points: bool = Field(False, description="Adds step and memory of all layouts to the answer.")
    sensitivity: bool = Field(
        False, description="Adds what other devices, links, memory and batches change; takes longer."
    )
    options: LayoutOptions = LayoutOptions()


def read_layouts(asked: LayoutRequest) -> Request:
    """The solver's question; raises :class:`InvalidInput`, with pointers into the request."""
    try:
        cluster = parse_cluster(asked.cluster)
    except InvalidInput as error:
        raise error.below("/cluster") from None
    if cluster.devices > MAX_DEVICES:
        raise InvalidInput.at(
            "/cluster", f"found {cluster.devices} devices; this service takes at most {MAX_DEVICES}."
        )
    try:
        found = parse_request(
            asked.model,
            cluster,
            Fixed(**asked.fixed.model_dump()),
            parallel={name: value for name in KEPT if (value := getattr(asked, name)) is not None},
            executor=asked.executor,
            **{name: getattr(asked, name) for name in BatchConfig.model_fields},
        )
    except InvalidInput as error:
        issues = [_placed(issue, asked) for issue in error.issues]
        raise InvalidInput(issues, error.more, error.is_partial) from None
    found = replace(found, profiles=tuple(_profiles(asked)))
    if found.global_batch > MAX_BATCH:
        raise InvalidInput.at(
            "/model/global_batch",
            f"found {found.global_batch}; this service takes at most {MAX_BATCH} sequences per step.",
        )
    for name in ("points", "sensitivity"):
        if asked.executor != FREE and getattr(asked, name):
            detail = f"found true and executor {asked.executor!r}; only zbv has this. Leave one of them out."
            raise InvalidInput.at(f"/{name}", detail)
    return found


def count_layouts(asked: LayoutRequest, found: Request) -> int:
    """The number of layouts; raises :class:`InvalidInput` if there is none, or too many, or none can run."""
    try:
        if asked.executor == FREE:
            return sum(map(len, families_of(asked, found)))
        layouts = found.layouts
    except InvalidInput as error:
        issues = [
            _placed(each, asked) if each.source or each.pointer.startswith("/parallel/") else each
            for each in error.issues
        ]
        raise InvalidInput(issues, error.more, error.is_partial) from None
    try:
        require_runnable(asked.executor, found.setting, layouts)
    except InvalidInput as error:
        raise error.below("/executor") from None
    return len(layouts)


def families_of(asked: LayoutRequest, found: Request) -> Iterator[LayoutFamily]:
    """The layouts of a request for zbv itself; raises :class:`InvalidInput` when iterated."""
    return found.families(MOST_LISTED if asked.points else MOST_LAYOUTS)


def _profiles(asked: LayoutRequest) -> Iterator[Profile]:
    for at, document in enumerate(asked.profiles):
        source = f"profiles/{at}"
        try:
            yield parse_profile(document, source)
        except InvalidInput as error:
            issues = [Issue(f"/{source}{each.pointer}", each.detail) for each in error.issues]
            raise InvalidInput(issues, error.more, error.is_partial) from None


def _placed(issue: Issue, asked: LayoutRequest) -> Issue:
    """An issue of ``model.json``, its flags or a profile at its place in the request."""
    if issue.source:
        return Issue(f"/{issue.source}{issue.pointer}", issue.detail)
    name = issue.pointer[1:]
    of_batch = name.partition("/")[0]
    if of_batch in BatchConfig.model_fields and (getattr(asked, of_batch) or of_batch not in asked.model):
        return issue
    if issue.pointer == "/model/sequence" and (asked.sequence_length or is_transformers_config(asked.model)):
        return replace(issue, pointer="/sequence_length")
    of_model = issue.pointer.removeprefix("/model/")
    if of_model in OF_MODEL and getattr(asked, of_model) is not None:
        return replace(issue, pointer=f"/{of_model}")
    key = issue.pointer.removeprefix("/parallel/")
    if key in KEPT and getattr(asked, key) is not None:
        return replace(issue, pointer=f"/{key}")
    return replace(issue, pointer=f"/model{issue.pointer}")


def layouts_summary(asked: LayoutRequest, found: Request) -> dict[str, Any]:
    """The few values of a request that lists show."""
    presets, devices = asked.model.get("presets"), [group.preset for group in found.cluster.groups]
    kind = asked.model.get("model_type")
    name = ", ".join(map(str, presets)) if isinstance(presets, list) and presets else kind
    return {
        "model": name[:MAX_NAME] if isinstance(name, str) else None,
        "device": None if None in devices else ", ".join(dict.fromkeys(filter(None, devices))),
        "devices": found.cluster.devices,
        "global_batch": found.global_batch,
        "sequence_length": found.config.model.sequence,
        "layouts": count_layouts(asked, found),
    }


def new_layout_search(settings: Settings, body: Any) -> NewSearch:
    """The search of a decoded request body; takes seconds for a large cluster, whose layouts it counts.

    Raises
    ------
    InvalidInput
        The body breaks a rule, or no layout divides the cluster.
    """
    asked = parse_body(LayoutRequest, body)
    require_allowed(asked.options.effort, asked.options.time_limit, settings)
    summary = layouts_summary(asked, read_layouts(asked))
    normal, options = asked.model_dump(mode="json", exclude={"name"}), asked.options.model_dump()
    key = canonical_json({"layouts": normal, "version": __version__})
    return NewSearch(
        id=uuid.uuid4().hex,
        request_key=hashlib.sha256(key.encode()).hexdigest(),
        problem=pack(normal),
        summary=summary,
        options=options,
        kind="layouts",
        name=asked.name,
    )
