"""Layers from the two files of Hetu-Galvatron's profiler: forward times, and memory (docs/formats.md#layers).

The sources are its documentation of both files (``search_engine_usage.md``) and its own costs of a layer
(``cost_model/components/layer_cost.py``): the backward takes twice as long as the forward, and states are
four times as large as the parameters in float32. Only what it measured of whole layers is read, because
these files have no exchanges between devices that share a layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from zbv_solver.documents.fields import Count, Document
from zbv_solver.documents.files import read_json
from zbv_solver.documents.validation import quoted, validated
from zbv_solver.errors import InvalidInput

UNITS = {"time": "us", "memory": "bytes"}
MEBIBYTE, MILLISECOND = 2.0**20, 1000.0
STATES = 4
"""Bytes of parameters, gradients and optimizer states by those of the parameters in float32."""
TIME = re.compile(r"layertype_(\d+|other)_bsz(\d+)_seq(\d+)")
FIRST, LAST = "other_memory_pp_on_first", "other_memory_pp_on_last"
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]


class Profile(Document):
    """What ``layers`` of a problem says in place of layers: two files, and what they do not say."""

    files: Annotated[list[str], Field(min_length=2, max_length=2)]
    repeat: Annotated[list[Count], Field(min_length=1, max_length=8)]
    """Layers of every type."""
    microbatch_size: Count
    sequence_length: Count


class _Whole(BaseModel):
    """MiB by the degree of tensor parallelism, of which only 1 is read: a layer on one device."""

    whole: Amount = Field(alias="1")
    checkpoint: Amount = 0.0
    """What a recomputed layer keeps of a sequence."""


class _Block(BaseModel):
    """Memory of a layer."""

    parameter_size: Amount
    tp_activation_per_bsz_dict: _Whole


class _End(BaseModel):
    """Memory of what a model has before its first or after its last layer."""

    model_states: _Whole
    activation: _Whole


def with_profile_read(document: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A problem's document with the layers that its profile's files in ``folder`` measure.

    Raises
    ------
    InvalidInput
        The files are others, or do not have what the document asks for.
    OSError
        A file cannot be read.
    """
    units = document.get("units", UNITS)
    if units != UNITS:
        detail = f"found {quoted(units)}; layers of Galvatron are in {quoted(UNITS)}. Leave this key out."
        raise InvalidInput.at("/units", detail)
    try:
        profile = validated(Profile, document["layers"])
        return {**document, "units": UNITS, "layers": _layers(profile, folder)}
    except InvalidInput as error:
        raise error.below("/layers") from None


def _layers(profile: Profile, folder: Path) -> list[dict[str, Any]]:
    times, memory = _files(profile, folder)
    size, sequence = profile.microbatch_size, profile.sequence_length
    found = {kind: each * size for (kind, *sizes), each in times.items() if sizes == [size, sequence]}
    kinds = [str(kind) for kind in range(len(profile.repeat))]
    if found.keys() != {*kinds, "other"}:
        known = ", ".join(f"{kind} of {some} x {tokens}" for kind, some, tokens in sorted(times))
        rule = "the file must have every type of layers, and other, for microbatches of this size"
        detail = f"found {len(kinds)} types and {size} x {sequence} tokens; {rule}. It has {known}."
        raise InvalidInput.at("/repeat", detail)
    blocks = []
    for kind, repeat in zip(kinds, profile.repeat, strict=True):
        block = _entry(_Block, memory, f"layertype_{kind}", sequence)
        kept = block.tp_activation_per_bsz_dict
        costs = _costs(found[kind], kept.whole * size, static=STATES * block.parameter_size)
        again = _costs(found[kind], kept.checkpoint * size, kept.whole * size)
        again = {"backward_input": 2 * found[kind], "memory": again["memory"]}
        blocks.append({"name": f"layer_{kind}", "repeat": repeat, **costs, "recompute": again})
    ends = [
        {"name": name, **_costs(time, static=end.model_states.whole, workspace=end.activation.whole * size)}
        for name, time, key in (("embedding", 0.0, FIRST), ("head", found["other"], LAST))
        for end in (_entry(_End, memory, key, sequence),)
    ]
    return [ends[0], *blocks, ends[1]]


def _costs(time: float, after: float = 0.0, all_of_it: float | None = None, **more: float) -> dict[str, Any]:
    """Costs of a layer that keeps ``after`` MiB from its F to its I, and then all of it to the end of W.

    I and W take as long as F each.
    """
    held = after if all_of_it is None else all_of_it
    deltas = {"forward": after, "backward_input": held - after, "backward_weight": -held}
    memory = {key: value * MEBIBYTE for key, value in (deltas | more).items()}
    return {"forward": time, "backward_input": time, "backward_weight": time, "memory": memory}


def _files(profile: Profile, folder: Path) -> tuple[dict[tuple[str, int, int], float], dict[str, Any]]:
    """Forward times of a sequence in µs, by type, sequences and tokens; and the file of memory."""
    times, memory = dict[tuple[str, int, int], float](), dict[str, Any]()
    for at, name in enumerate(profile.files):
        document = read_json(folder / name)
        keys = [key.removesuffix("_sp") for key in document] if isinstance(document, dict) else []
        matches = [match for key in keys if (match := TIME.fullmatch(key))]
        if not matches and FIRST not in keys:
            rule = "must be computation_profiling_*.json and memory_profiling_*.json of Hetu-Galvatron"
            raise InvalidInput.at(f"/files/{at}", f"found {name}, which is neither; {rule}, processed by it.")
        if matches:
            values = _checked(dict[str, Amount], document, name)
            times |= {
                (each[1], int(each[2]), int(each[3])): values[each[0]] * MILLISECOND for each in matches
            }
        else:
            memory |= dict(zip(keys, document.values(), strict=True))
    return times, memory


def _entry(kind: Any, memory: Mapping[str, Any], key: str, sequence: int) -> Any:
    found = memory.get(key)
    found = found.get(str(sequence)) if isinstance(found, dict) else None
    if found is None:
        detail = f"found no {key} for {sequence} tokens in the file of memory. Profile this length, too."
        raise InvalidInput.at("/sequence_length", detail)
    return _checked(kind, found, key)


def _checked(kind: Any, values: Any, name: str) -> Any:
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, (name, *first["loc"])))
        detail = f"found {quoted(first['input'])} for {place}; must be a number from 0. Profile it again."
        raise InvalidInput.at("/files", detail) from None
