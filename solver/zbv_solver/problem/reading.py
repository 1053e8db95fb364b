"""From JSON documents to problems, by stages or by layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zbv_solver.documents.files import load
from zbv_solver.documents.layer_table import with_files_read
from zbv_solver.documents.validation import require_kind, validated
from zbv_solver.errors import InvalidInput, Issue
from zbv_solver.problem.cut import Cut, CutRules, Link, cut_of_partition
from zbv_solver.problem.documents import (
    CommunicationDocument,
    CostsDocument,
    LayerCommunicationDocument,
    LayerDocument,
    LayeredCostsDocument,
    LayeredMemoryDocument,
    LayeredProblemDocument,
    LayerMemoryDocument,
    MemoryDocument,
    ProblemDocument,
    RecomputeDocument,
)
from zbv_solver.problem.layer import (
    Layer,
    LayerCommunication,
    LayerCosts,
    LayerMemory,
    Model,
    OnDevice,
)
from zbv_solver.problem.layered_problem import AnyProblem, LayeredProblem
from zbv_solver.problem.numeric import exceeds, first_broken
from zbv_solver.problem.problem import Problem, Units, size_rule
from zbv_solver.problem.stages import (
    COMMUNICATION,
    FIXED,
    Communication,
    Copies,
    Costs,
    Deltas,
    Feature,
    Memory,
    Placement,
)

TOKENS, TOKENS_SQUARED = "tokens", "tokens_squared"
"""The features that ``sequences`` stands for."""
_BY_STAGE = ("forward", "backward_input", "backward_weight")
_COPIED = ("offload", "reload", "offloadable")


def load_problem(path: str | Path) -> AnyProblem:
    """Read a problem file, and the files that its layers may be in; ``-`` is standard input.

    Raises
    ------
    InvalidInput
        When the file is not JSON or breaks a rule.
    OSError
        When a file cannot be read.
    """

    def parse(document: Any) -> AnyProblem:
        require_kind(document, "problem")
        return parse_any_problem(with_files_read(document, Path(path).parent))

    return load(path, parse)


def parse_any_problem(document: Any) -> AnyProblem:
    """Parse a decoded JSON document; layers without a partition become a :class:`LayeredProblem`.

    Raises
    ------
    InvalidInput
        With one issue per broken rule; pointers are into the document.
    """
    if isinstance(document, dict) and "layers" in document and document.get("partition") is None:
        return to_layered(validated(LayeredProblemDocument, document))
    return parse_problem(document)


def parse_problem(document: Any) -> Problem:
    """Parse a decoded JSON document whose stages are known, directly or by a partition of its layers.

    Raises :class:`InvalidInput` with one issue per broken rule; pointers are into the document. Layers
    without a partition are refused.
    """
    if isinstance(document, dict) and "layers" in document:
        return to_cut_problem(validated(LayeredProblemDocument, document))
    return to_problem(validated(ProblemDocument, document))


def to_problem(document: ProblemDocument) -> Problem:
    """A validated document as a problem: every value is expanded to one per stage, boundary or rank."""
    _require_possible_chunks(document.placement, document.chunks)
    placement = Placement.of(document.placement, document.pp_degree, document.chunks)
    issues = [*size_rule(placement, document.microbatches)]
    if issues:  # checked before values expand: a short document must not fill the memory
        raise InvalidInput(issues)
    values = _feature_values(document)
    none = MemoryDocument(forward=0.0, backward_input=0.0, backward_weight=0.0)
    costs = _expanded("/costs", document.costs, placement, values, issues)
    stated, communication = document.costs.communication, {}
    if stated is not None:
        communication = _expanded(f"/{COMMUNICATION}", stated, placement, values, issues)
    memory = _expanded("/memory", document.memory or none, placement, values, issues)
    if issues:
        raise InvalidInput(issues)
    return Problem(
        placement,
        document.microbatches,
        Costs(**_part(costs, FIXED)),
        Memory(**_part(memory, FIXED)),
        document.objective,
        document.units or Units(),
        measured=tuple(sorted((document.measured or {}).items())),
        features=tuple(
            Feature(
                name,
                value,
                Costs(**_part(costs, name)),
                Deltas(**_part(memory, name)),
                Communication(**_part(communication, name)) if communication else None,
            )
            for name, value in values.items()
        ),
        communication=Communication(**_part(communication, FIXED)) if communication else None,
        pair_factor=document.costs.pair_factor if communication else 1.0,
        copies=_copies(document, placement, memory),
    )


def _copies(document: ProblemDocument, placement: Placement, memory: _Expanded) -> Copies | None:
    """The copies to the host that a document allows; raises :class:`InvalidInput`."""
    costs, stated, issues = document.costs, document.memory, list[Issue]()
    host = None if stated is None else stated.host_limit
    amount = None if stated is None else stated.offloadable
    if costs.offload is None:
        for at, value in (
            ("/costs/reload", costs.reload),
            ("/memory/offloadable", amount),
            ("/memory/host_limit", host),
        ):
            if value is not None:
                issues.append(
                    Issue(at, "found without costs.offload, the time of a copy to the host; state it.")
                )
        if issues:
            raise InvalidInput(issues)
        return None
    stage, rank = (placement.n_stages, "stage"), (placement.pp_degree, "rank")
    offload = _lengthened("/costs/offload", costs.offload, stage, placement, issues)
    copies = Copies(
        offload,
        offload
        if costs.reload is None
        else _lengthened("/costs/reload", costs.reload, stage, placement, issues),
        memory["forward"][FIXED]
        if amount is None
        else _lengthened("/memory/offloadable", amount, stage, placement, issues),
        None if host is None else _lengthened("/memory/host_limit", host, rank, placement, issues),
    )
    if issues:
        raise InvalidInput(issues)
    return copies


def _feature_values(document: ProblemDocument) -> dict[str, tuple[float, ...]]:
    """The features of a document, those of its sequences included; raises :class:`InvalidInput`."""
    values = {name: tuple(each) for name, each in (document.features or {}).items()}
    if FIXED in values:
        raise InvalidInput.at(
            f"/features/{FIXED}", f"found a feature named {FIXED}, which means the part without features."
        )
    if document.sequences is None:
        return values
    for index, lengths in enumerate(document.sequences):
        if (broken := first_broken(lengths)) is not None:
            raise InvalidInput.at(f"/sequences/{index}/{broken[0]}", broken[1])
    if len(document.sequences) != document.microbatches:
        raise InvalidInput.at(
            "/sequences",
            f"found {len(document.sequences)} lists; must be {document.microbatches}, one per microbatch.",
        )
    for name, power in ((TOKENS, 1), (TOKENS_SQUARED, 2)):
        if name in values:
            raise InvalidInput.at(
                f"/features/{name}",
                "found together with sequences, which define this feature; give one of them.",
            )
        values[name] = tuple(float(sum(length**power for length in each)) for each in document.sequences)
    return values


_Expanded = dict[str, dict[str, tuple[float, ...]]]
"""One value per stage, boundary or rank, by key of a section, and then by feature or ``fixed``."""


def _expanded(
    at: str,
    section: CostsDocument | MemoryDocument | CommunicationDocument,
    placement: Placement,
    features: Iterable[str],
    issues: list[Issue],
) -> _Expanded:
    """The numbers of a section in full; ``issues`` gets what is wrong."""
    boundary, rank = (placement.n_stages - 1, "stage boundary"), (placement.pp_degree, "rank")
    needed = {"p2p": boundary, "static": rank, "limit": rank}
    expanded: _Expanded = {}
    for key, values in section:
        if values is None or key in _NOT_EXPANDED:
            continue
        item = needed.get(key, (placement.n_stages, "stage"))
        parts = (FIXED,) if item is rank else (FIXED, *features)
        amounts = expanded[key] = dict.fromkeys(parts, (0.0,) * item[0])
        for name, amount in values.items() if isinstance(values, dict) else ((FIXED, values),):
            pointer = f"{at}/{key}/{name}" if isinstance(values, dict) else f"{at}/{key}"
            if name in amounts:
                amounts[name] = _lengthened(pointer, amount, item, placement, issues)
            else:
                issues.append(Issue(pointer, _unknown(name, [*features])))
    return expanded


_NOT_EXPANDED = ("communication", "pair_factor", "offload", "reload", "offloadable", "host_limit")
"""Keys of costs and memory that are not part of the records of the same name."""


def _part(section: _Expanded, name: str) -> dict[str, tuple[float, ...]]:
    """The coefficients of a feature, or the fixed part, by key."""
    return {key: amounts[name] for key, amounts in section.items() if name in amounts}


def _lengthened(
    at: str,
    values: float | list[float],
    needed: tuple[int, str],
    placement: Placement,
    issues: list[Issue],
) -> tuple[float, ...]:
    """One value per stage, boundary or rank; ``issues`` gets lists of wrong lengths."""
    length, item = needed
    if not isinstance(values, list):
        return (float(values),) * length
    if len(values) == length:
        return tuple(map(float, values))
    if item == "stage" and len(values) == placement.chunks:
        return tuple(float(values[chunk]) for chunk in placement.chunk_of)
    per_chunk = f", {placement.chunks} values (one per chunk)" if item == "stage" else ""
    rule = f"must be a number{per_chunk} or {length} values (one per {item})."
    issues.append(Issue(at, f"found {len(values)} values; {rule}"))
    return ()


def _unknown(name: str, features: list[str]) -> str:
    if not features:
        return (
            f"found {name!r}, but the problem has no features; give /features or /sequences, one number or "
            f"list per microbatch, or use a plain number here."
        )
    return f"found {name!r}; must be {FIXED} or one of the features {', '.join(features)}."


def to_layered(document: LayeredProblemDocument) -> LayeredProblem:
    """A validated document as a layered problem; raises :class:`InvalidInput`."""
    memory, costs = document.memory or LayeredMemoryDocument(), document.costs or LayeredCostsDocument()
    rules = document.cut or CutRules()
    static = memory.static if memory.static_beside_layers is None else memory.static_beside_layers
    has_empty_stage = any(not stage for stage in document.partition or ())
    p = document.pp_degree
    _require_possible_chunks(document.placement, document.chunks)
    if document.chunks is not None and document.placement == "auto":
        raise InvalidInput.at(
            "/chunks",
            f"found {document.chunks}; placement auto chooses the number of chunks. Remove this key, or use "
            f"placement loop.",
        )
    if costs.link is not None and costs.p2p is not None and document.partition is None:
        raise InvalidInput.at("/costs", "found both p2p and link; give one of them.")
    if document.partition is None and (issues := [*_stage_issues(document)]):
        raise InvalidInput(issues)
    if costs.host_link is None and memory.host_limit is not None:
        detail = "found without costs.host_link, over which layers would be copied to the host; state it."
        raise InvalidInput.at("/memory/host_limit", detail)
    model = Model(tuple(map(_layer, document.layers)), tuple(document.recompute_modules or ()))
    return LayeredProblem(
        model=model,
        pp_degree=p,
        microbatches=document.microbatches,
        static=_per_rank(static, p),
        limit=None if memory.limit is None else _per_rank(memory.limit, p),
        placement=document.placement,
        chunks=(document.chunks or 2) if document.placement == "loop" else None,
        objective=document.objective,
        p2p=0.0 if costs.p2p is None or isinstance(costs.p2p, list) else costs.p2p,
        link=costs.link if isinstance(costs.link, Link) else None,
        links=tuple(costs.link) if isinstance(costs.link, list) else (),
        devices=tuple(document.devices or ()),
        rules=replace(rules, allow_empty=True) if has_empty_stage else rules,
        units=document.units or Units(),
        measured=tuple(sorted((document.measured or {}).items())),
        blocking=costs.blocking,
        pair_factor=costs.pair_factor if model.has_communication else 1.0,
        host=costs.host_link,
        host_limit=None if memory.host_limit is None else _per_rank(memory.host_limit, p),
    )


def _layer(document: LayerDocument) -> Layer:
    """A layer; absent keys of its recomputed costs, and of those on a device, have its own values."""
    costs = LayerCosts(
        document.forward,
        document.backward_input,
        document.backward_weight,
        document.backward,
        _layer_memory(document.memory, document.parameters_bytes),
        _layer_communication(document.communication),
    )
    on = (
        (name, _changed(costs, each) or costs, each.recompute) for name, each in (document.on or {}).items()
    )
    return Layer(
        document.name,
        costs,
        _changed(costs, document.recompute),
        document.parameters_bytes,
        document.output_bytes,
        document.repeat,
        tuple(OnDevice(name, own, _changed(own, again)) for name, own, again in on),
    )


def _layer_memory(document: LayerMemoryDocument | None, static: float) -> LayerMemory:
    """Memory of a layer; ``static`` is used where the document has none."""
    given = {} if document is None else document.model_dump(exclude_none=True)
    return LayerMemory(**{"static": static, **given})


def _layer_communication(document: LayerCommunicationDocument | None) -> LayerCommunication | None:
    return None if document is None else LayerCommunication(**document.model_dump())


def _changed(plain: LayerCosts, change: RecomputeDocument | None) -> LayerCosts | None:
    """Costs of a recomputed layer, or of one on another device; None without a change."""
    if change is None:
        return None
    given = change.model_dump(exclude_none=True, exclude={"memory", "communication", "recompute"})
    costs = replace(plain, **given)
    if change.backward is None and plain.backward is not None:
        costs = replace(costs, backward=max(0.0, plain.backward + (costs.split - plain.split)))
    if change.memory is not None:
        costs = replace(costs, memory=_layer_memory(change.memory, plain.memory.static))
    if change.communication is not None:
        costs = replace(costs, communication=_layer_communication(change.communication))
    return costs


def to_cut_problem(document: LayeredProblemDocument) -> Problem:
    """The problem of a validated document that has a partition.

    Raises :class:`InvalidInput` when there is no partition, or when stated costs of stages differ from those
    of their layers.
    """
    if document.partition is None:
        raise InvalidInput.at(
            "/partition",
            "this key is absent, so the layers are not cut into stages. Let `zbv plan` cut them, or POST "
            "/v1/searches.",
        )
    layered = to_layered(document)
    bounds = cut_of_partition(layered.model, document.partition)
    if document.placement == "auto":
        raise InvalidInput.at(
            "/placement", "found 'auto' with a partition; name the placement of the partition."
        )
    (placement,) = layered.placements
    if len(bounds) - 1 != placement.n_stages:
        rule = f"found {len(bounds) - 1} stages; placement {placement.kind} has {placement.n_stages}."
        raise InvalidInput.at("/partition", rule)
    recompute = document.recompute or [False] * placement.n_stages
    if len(recompute) != placement.n_stages:
        rule = f"found {len(recompute)} values; must be {placement.n_stages}, one per stage."
        raise InvalidInput.at("/recompute", rule)
    problem = layered.cut_into(placement, Cut.at(bounds, recompute))
    costs = document.costs
    if costs is not None and isinstance(costs.p2p, list) and costs.link is None:
        problem = replace(problem, costs=replace(problem.costs, p2p=tuple(costs.p2p)))
    if issues := [*_disagreements(document, problem)]:
        raise InvalidInput(issues)
    return problem


def _require_possible_chunks(placement: str, chunks: int | None) -> None:
    """Raise :class:`InvalidInput` when the placement implies another number of stages per rank."""
    expected = {"v": 2, "single": 1}.get(placement)
    if chunks is not None and expected is not None and chunks != expected:
        raise InvalidInput.at(
            "/chunks",
            f"found {chunks}; placement {placement} has {expected} per rank. Leave this key out, or use "
            f"placement loop.",
        )


def _stage_issues(document: LayeredProblemDocument) -> Iterator[Issue]:
    """Costs of stages that are given although no partition defines the stages."""
    for at, section in (("/costs", document.costs), ("/memory", document.memory)):
        for name in (*_BY_STAGE, "backward", "communication", "static_beside_layers", *_COPIED):
            if getattr(section, name, None) is not None:
                yield Issue(
                    f"{at}/{name}", "found together with layers, which determine it. Remove this key."
                )
    if document.costs is not None and isinstance(document.costs.p2p, list):
        yield Issue("/costs/p2p", "found a list; before layers are cut it must be one number, or a link.")
    if document.recompute is not None:
        yield Issue("/recompute", "found without a partition; the planner decides. Remove this key.")


def _disagreements(document: LayeredProblemDocument, problem: Problem) -> Iterator[Issue]:
    """Stated values of stages that differ from those of their layers."""
    stated = None if document.costs is None else document.costs.communication
    by_stage = (*_BY_STAGE, "backward", "p2p", "static")
    for at, given, found, names in (
        ("/costs", document.costs, problem.costs, by_stage),
        ("/costs", document.costs, problem.copies, _COPIED[:2]),
        (f"/{COMMUNICATION}", stated, problem.communication, by_stage),
        ("/memory", document.memory, problem.memory, by_stage),
        ("/memory", document.memory, problem.copies, _COPIED[2:]),
    ):
        for name in names:
            values = getattr(given, name, None)
            if name in _COPIED and values is not None and problem.copies is None:
                yield Issue(f"{at}/{name}", "found without costs.host_link, which layers need; state it.")
                continue
            if not isinstance(values, list):
                continue
            if name == "static" and getattr(given, "static_beside_layers", None) is None:
                continue  # a list of what ranks hold in addition to the layers
            computed = getattr(found, name, None) or ()
            if len(values) != len(computed) or any(map(_differ, values, computed)):
                yield Issue(
                    f"{at}/{name}",
                    f"found {_brief(values)}; the layers of the partition give {_brief(computed)}. Correct "
                    f"the layers, or remove this key.",
                )


def _differ(stated: float, computed: float) -> bool:
    return exceeds(stated, computed) or exceeds(computed, stated)


def _brief(values: Sequence[float]) -> str:
    text = ", ".join(f"{value:.6g}" for value in values[:4])
    return f"[{text}{', …' if len(values) > 4 else ''}]"


def _per_rank(values: float | list[float], p: int) -> tuple[float, ...]:
    return tuple(map(float, values)) if isinstance(values, list) else (float(values),) * p
