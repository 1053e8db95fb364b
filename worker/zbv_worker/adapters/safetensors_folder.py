"""Reads and writes the tensors of some layers in a folder of safetensors, in transformers' layout.

A folder has ``config.json`` and either ``model.safetensors`` or several files with an index,
``model.safetensors.index.json``. Names and shapes in the files may differ from the model's (one tensor per
expert instead of one for all); transformers' own table of conversions translates in both directions.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zbv_worker.errors import InvalidRun

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def read_tensors(
    folder: Path, model: Any, wanted: Collection[str], tied: Mapping[str, str]
) -> dict[str, Tensor]:
    """Read some tensors of a model, and only those, on the CPU.

    Parameters
    ----------
    model
        The whole model, on the meta device.
    wanted
        Names of the model's parameters and buffers.
    tied
        The first name of each parameter that has several. The folder needs only one of the names.

    Raises
    ------
    InvalidRun
        If a tensor is missing, has a different shape or is quantized.
    """
    names = {
        name: [first, *(target for target, source in tied.items() if source == first)]
        for name in wanted
        for first in [tied.get(name, name)]
    }
    stored = _stored(folder, model, {name for some in names.values() for name in some})
    tensors = {
        name: next(stored[other] for other in some if other in stored)
        for name, some in names.items()
        if not stored.keys().isdisjoint(some)
    }
    _check(folder, model.state_dict(), wanted, tensors)
    return tensors


def equal_ties(folder: Path, model: Any, ties: Mapping[str, str]) -> dict[str, str]:
    """The ties that ``from_pretrained`` keeps: without those of which the folder has two different tensors.

    It compares them in the model's dtype.

    Parameters
    ----------
    model
        The whole model, on the meta device.
    ties
        By the configuration: the first name of each parameter that has several.
    """
    equal = {}
    for target, source in ties.items():
        dtype = model.get_parameter(source).dtype
        values = [each.to(dtype) for each in _stored(folder, model, {target, source}).values()]
        if all(torch.equal(values[0], other) for other in values):
            equal[target] = source
    return equal


def _stored(folder: Path, model: Any, wanted: Collection[str]) -> dict[str, Tensor]:
    """Those of the wanted tensors that a folder has, by name in the model."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    converter_of = {pattern: each for each in converters for pattern in each.source_patterns}
    expected, prefix = model.state_dict(), model.base_model_prefix
    files = _files(folder)
    mappings: dict[str, Any] = {}
    for key in sorted(files, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, prefix, expected)
        if target not in expected and key in expected:
            target, pattern = key, None
        if target in wanted:
            made = WeightRenaming(key, target) if pattern is None else copy.deepcopy(converter_of[pattern])
            mapping = mappings.setdefault(target, made)
            mapping.add_tensor(target, key, pattern or key, lambda key=key: _read(files[key], key))
    found: dict[str, Tensor] = {}
    for target, mapping in mappings.items():
        for name, value in mapping.convert(target, model=model, config=model.config).items():
            found[name] = value[0] if isinstance(value, list) else value
    return found


def _check(
    folder: Path, expected: Mapping[str, Tensor], wanted: Iterable[str], found: Mapping[str, Tensor]
) -> None:
    for name in sorted(wanted):
        if name not in found:
            raise InvalidRun(
                f"{folder}: found no tensor {name}, which config.json requires. Use a folder that "
                f"save_pretrained has written completely, or correct tie_word_embeddings in config.json."
            )
        if found[name].shape != expected[name].shape:
            raise InvalidRun(
                f"{folder}: found {name} with shape {tuple(found[name].shape)}; config.json requires "
                f"{tuple(expected[name].shape)}. Correct config.json, or use the folder of this model."
            )
        dtype = found[name].dtype
        if expected[name].is_floating_point() and (not dtype.is_floating_point or dtype.itemsize < 2):
            raise InvalidRun(
                f"{folder}: found {name} in {dtype}, so it is quantized, and its scales are other tensors. "
                f"zbv trains parameters in 16 or 32 bits. Use a folder of this model with such tensors."
            )


def _files(folder: Path) -> dict[str, Path]:
    """The file of every tensor; raises :class:`InvalidRun`."""
    index, single = folder / _INDEX, folder / _SINGLE
    if index.is_file():
        try:
            entries = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRun(
                f"{index}: found no weight_map ({error}). Use a folder written by save_pretrained."
            ) from None
        missing = sorted({name for name in entries.values() if not (folder / name).is_file()})
        if missing:
            raise InvalidRun(f"{folder}: the index names {', '.join(missing)}; copy these files there too.")
        return {key: folder / name for key, name in entries.items()}
    if single.is_file():
        with _opened(single) as file:
            return dict.fromkeys(file.keys(), single)
    raise InvalidRun(
        f"{folder}: found neither {_SINGLE} nor {_INDEX}. Save the model as safetensors, or pass config.json "
        f"itself to start from random parameters."
    )


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise InvalidRun(f"{path}: cannot be read as safetensors ({error}). Copy the file again.") from None


def _read(path: Path, key: str) -> Tensor:
    with _opened(path) as file:
        tensor: Tensor = file.get_tensor(key)
        return tensor


def file_name(file: int, files: int) -> str:
    """The name of one of several files, as transformers names them; ``file`` counts from 0."""
    return _SINGLE if files == 1 else f"model-{file + 1:05}-of-{files:05}.safetensors"


def write_tensors(folder: Path, model: Any, tensors: Mapping[str, Tensor], file: int, files: int) -> None:
    """Write tensors, named as in the model, as one of several files."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    stored = _as_stored(model, {name: tensor.detach() for name, tensor in tensors.items()})
    at_hand = {name: tensor.cpu().contiguous().clone() for name, tensor in stored.items()}
    save_file(at_hand, folder / file_name(file, files), metadata={"format": "pt"})


def write_index(folder: Path, model: Any, names_of_files: list[list[str]], *, is_tied: bool) -> None:
    """Write the configuration, and the index of several files that other ranks write.

    Parameters
    ----------
    names_of_files
        The names of each file's tensors in the model.
    is_tied
        Whether the embedding and the head are one parameter.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = is_tied
    config.save_pretrained(folder)
    if len(names_of_files) == 1:
        return
    expected = model.state_dict()
    weight_map: dict[str, str] = {}
    total = 0
    for at, names in enumerate(names_of_files):
        stored = _as_stored(model, {name: torch.empty_like(expected[name], device="meta") for name in names})
        weight_map |= dict.fromkeys(stored, file_name(at, len(names_of_files)))
        total += sum(tensor.nbytes for tensor in stored.values())
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / _INDEX).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _as_stored(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with the names and shapes of files."""
    from transformers.core_model_loading import revert_weight_conversion

    converted: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    return converted
