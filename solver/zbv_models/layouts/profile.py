"""Measured layers: what ``zbv-worker profile`` writes, read as costs under stated conditions."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from zbv_solver.documents.validation import quoted, require_kind, validated
from zbv_solver.errors import InvalidInput, Issue
from zbv_solver.problem.documents import AllReduceDocument, LayeredProblemDocument, ProfileDocument
from zbv_solver.problem.layer import Layer, LayerCosts
from zbv_solver.problem.reading import to_layered

from zbv_models.estimate.device import GroupLink
from zbv_models.estimate.replica import Running
from zbv_models.estimate.shapes import PerAction
from zbv_models.layouts.cluster import BYTES_PER_MICROSECOND

UNITS = {"time": "us", "memory": "bytes"}
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of a value of the stream, by the program's precision."""


@dataclass(frozen=True)
class MeasuredLayer:
    """Costs of one layer on one device, in microseconds and bytes."""

    name: str
    plain: Running
    recomputed: Running | None
    """None if that was not measured."""
    static: float
    """Parameters, gradients and optimizer."""
    output_bytes: float
    update: float | None
    """Time of the optimizer's step; None if that was not measured."""


@dataclass(frozen=True)
class Profile:
    """Measured layers of one size of microbatches, on one device of every rank."""

    source: str
    """The file."""
    microbatch_size: int
    """Sequences."""
    sequence: int
    """Tokens."""
    tensor: int
    """Degree of tensor parallelism."""
    program: tuple[tuple[str, str], ...]
    """Names and values of everything else that decides how long an action takes."""
    layers: tuple[MeasuredLayer, ...]
    link: GroupLink | None = None
    """Measured transfers between two ranks; None without any."""
    all_reduce: tuple[tuple[int, GroupLink], ...] = ()
    """By the number of ranks; a rank of n sends 2 (n - 1) / n of the tensor."""
    scatter_gather: tuple[tuple[int, GroupLink], ...] = ()
    """A reduce-scatter with an all-gather, which replicas with shards of states do instead."""

    @property
    def tokens(self) -> int:
        """Tokens per microbatch."""
        return self.microbatch_size * self.sequence

    def issues(self, names: Sequence[str], dtype_bytes: int, device: str | None) -> Iterator[Issue]:
        """Differences from what layouts are searched for; pointers are into the profile.

        Parameters
        ----------
        names
            The model's layers.
        dtype_bytes
            Size of a value of the model's stream.
        device
            The preset of the cluster's devices; None if it has no name.
        """
        known = ", ".join(names)
        for at, layer in enumerate(self.layers):
            if layer.name not in names:
                detail = f"found {layer.name!r}; the model has the layers {known}. Rename it, or remove it."
                yield Issue(f"/layers/{at}/name", detail, self.source)
        program = dict(self.program)
        precision = program.get("precision")
        if precision is not None and DTYPE_BYTES.get(precision, dtype_bytes) != dtype_bytes:
            detail = (
                f"found {precision!r}, but values of the model have {dtype_bytes} bytes. Measure with the "
                f"precision of the model, or correct the model's dtype."
            )
            yield Issue("/measured/precision", detail, self.source)
        measured_on = program.get("device")
        if device is not None and measured_on is not None and not _is_device(device, measured_on):
            detail = (
                f"found {measured_on!r}, but the cluster has devices {device!r}. Measure on such a device, "
                f"or describe the cluster's devices without a preset."
            )
            yield Issue("/measured/device", detail, self.source)


def parse_profile(document: Any, source: str = "") -> Profile:
    """Parse a decoded problem of ``zbv-worker profile``.

    Raises :class:`InvalidInput` with one issue per broken rule.
    """
    if not isinstance(document, dict):
        raise InvalidInput.at("", f"found {quoted(document)}; must be a JSON object.")
    require_kind(document, "problem")
    if "layers" not in document:
        if "pp_degree" not in document:
            detail = "this is no profile. Give the problem that `zbv-worker profile` writes with -o."
            raise InvalidInput.at("", detail)
        detail = (
            "this key is absent, so whole stages were measured. Measure layers: `zbv-worker profile` without "
            "--by-stage, and a model that offers layers."
        )
        raise InvalidInput.at("/layers", detail)
    parsed = validated(LayeredProblemDocument, document)
    problem = to_layered(parsed)
    conditions = parsed.profile
    issues = [*_unit_issues(document.get("units"))]
    if conditions is None:
        detail = (
            "this key is absent, so the size of the measured microbatches is unknown. Measure with this "
            'version of zbv-worker, or add {"microbatch_size": sequences, "sequence_length": tokens}.'
        )
        issues.append(Issue("/profile", detail))
    if issues or conditions is None:
        raise InvalidInput(issues)
    link = problem.link
    return Profile(
        source,
        conditions.microbatch_size,
        conditions.sequence_length,
        conditions.tensor_parallel,
        problem.measured,
        tuple(_by_kind(problem.model.layers, conditions)),
        None if link is None else GroupLink(link.bandwidth / BYTES_PER_MICROSECOND, link.latency),
        _by_ranks(conditions.all_reduce),
        _by_ranks(conditions.scatter_gather),
    )


def _by_ranks(measured: Sequence[AllReduceDocument]) -> tuple[tuple[int, GroupLink], ...]:
    return tuple(
        (each.ranks, GroupLink(each.bandwidth / BYTES_PER_MICROSECOND, each.latency)) for each in measured
    )


def kind_of(name: str) -> str:
    """The name without the number of a copy: ``block`` of ``block.3``."""
    return re.sub(r"\.\d+$", "", name)


def _unit_issues(units: Any) -> Iterator[Issue]:
    units = units if isinstance(units, dict) else {}
    for key, unit in UNITS.items():
        if units.get(key) != unit:
            yield Issue(f"/units/{key}", f"found {quoted(units.get(key))}; must be {unit!r} in a profile.")


def _by_kind(layers: Sequence[Layer], conditions: ProfileDocument) -> Iterator[MeasuredLayer]:
    """One entry per kind of layer: copies that were measured apart are averaged."""
    kinds: defaultdict[str, list[Layer]] = defaultdict(list)
    for layer in layers:
        kinds[kind_of(layer.name)] += [layer] * (layer.repeat or 1)
    for name, some in kinds.items():
        again = [each.recompute for each in some if each.recompute is not None]
        updates = [
            conditions.update[key] for each in some for key in (each.name, name) if key in conditions.update
        ]
        yield MeasuredLayer(
            name,
            _running([each.costs for each in some]),
            _running(again) if again else None,
            mean(each.costs.memory.static for each in some),
            mean(each.output_bytes for each in some),
            mean(updates) if updates else None,
        )


def _running(costs: Sequence[LayerCosts]) -> Running:
    times = PerAction(
        mean(each.forward for each in costs),
        mean(each.backward_input for each in costs),
        mean(each.backward_weight for each in costs),
    )
    is_fused = any(each.backward is not None for each in costs)
    return Running(
        times,
        round(mean(each.memory.forward for each in costs)),
        round(mean(-each.memory.backward_weight for each in costs)),
        round(max(each.memory.workspace for each in costs)),
        mean(each.fused for each in costs) if is_fused else None,
    )


def _is_device(preset: str, measured_on: str) -> bool:
    """Whether a driver's name of a device, such as ``NVIDIA H100 80GB HBM3``, may be that of a preset."""
    return preset.lower().split("-")[0] in re.split(r"[^a-z0-9]+", measured_on.lower())
