"""Sections of a configuration: the types of their numbers, and the presets that ship with the package.

A preset is a configuration of a well-known model or device: a JSON file in ``presets/`` with some of the
sections ``model``, ``parallel`` and ``device``, the ``presets`` that it extends, ``about`` (one line),
``source`` (the source of its numbers) and ``published`` (figures from its source, for tests).
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from zbv_solver.documents.validation import quoted
from zbv_solver.errors import InvalidInput, did_you_mean

Size = Annotated[int, Field(strict=True, ge=1, le=100_000_000)]
Count = Annotated[int, Field(strict=True, ge=0, le=100_000_000)]
Total = Annotated[int, Field(strict=True, ge=0, le=10**12)]
Flag = Annotated[bool, Field(strict=True)]
Amount = Annotated[float, Field(strict=True, ge=0, le=1e15, allow_inf_nan=False)]
Rate = Annotated[float, Field(strict=True, gt=0, le=1e9, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]


class ConfigSection(BaseModel):
    """A section of a configuration: frozen, and without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


MAX_PRESETS = 8
"""Presets that a document may name."""
SECTIONS = ("model", "parallel", "device")

Section = dict[str, Any]


class Preset(BaseModel):
    """A preset file. Its sections are validated when they are used."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    about: str
    source: Annotated[list[str], Field(min_length=1)]
    published: dict[str, Any] = {}
    presets: list[str] = []
    model: Section = {}
    parallel: Section = {}
    device: Section = {}


@cache
def preset_names() -> tuple[str, ...]:
    """The names of all presets, in alphabetical order."""
    listed = files(__package__).joinpath("presets").iterdir()
    return tuple(sorted(each.name.removesuffix(".json") for each in listed if each.name.endswith(".json")))


def presets_of(section: str) -> tuple[str, ...]:
    """The names of the presets of models (``model``) or of devices (``device``)."""
    kinds = {name: "model" if preset(name).model else "device" for name in preset_names()}
    return tuple(name for name, kind in kinds.items() if kind == section)


def preset(name: str, pointer: str = "", section: str | None = None) -> Preset:
    """A preset by name.

    Raises :class:`InvalidInput` at ``pointer``, when there is no preset of this name, and of this section.
    """
    known = preset_names()
    if name not in known or (section is not None and name not in presets_of(section)):
        wanted = known if section is None else presets_of(section)
        what = "preset" if section is None else f"preset of a {section}"
        detail = f"found {quoted(name)}; not a {what}. Use one of {', '.join(wanted)}."
        raise InvalidInput.at(pointer, f"{detail}{did_you_mean(name, wanted)}")
    text = files(__package__).joinpath("presets", f"{name}.json").read_text(encoding="utf-8")
    return Preset.model_validate(json.loads(text))


def with_presets(document: Any, names: list[str], overrides: dict[str, Section]) -> dict[str, Any]:
    """Merge presets, a configuration document, and overrides.

    Later values replace earlier ones within each section. First come the presets of the document's key
    ``presets``, then those of ``names``, then the document, then the overrides. Values are not validated.
    """
    if not isinstance(document, dict):
        raise InvalidInput.at("", f"found {quoted(document)}; a configuration must be a JSON object.")
    own = {key: value for key, value in document.items() if key != "presets"}
    merged: dict[str, Any] = {}
    for layer in (*_preset_layers(_named(document)), *_preset_layers(names, "--preset"), own, overrides):
        for key, value in layer.items():
            before = merged.get(key)
            both = isinstance(before, dict) and isinstance(value, dict)
            merged[key] = before | value if both else value
    return merged


def _named(document: dict[str, Any]) -> list[str]:
    named = document.get("presets", [])
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise InvalidInput.at("/presets", f"found {quoted(named)}; must be a list of names.")
    if len(named) > MAX_PRESETS:
        raise InvalidInput.at("/presets", f"found {len(named)} names; must be at most {MAX_PRESETS}.")
    return named


def _preset_layers(names: list[str], pointer: str = "/presets") -> list[dict[str, Section]]:
    layers = []
    for place, name in enumerate(names):
        found = preset(name, pointer if pointer.startswith("-") else f"{pointer}/{place}")
        layers += _preset_layers(found.presets)
        layers.append({key: getattr(found, key) for key in SECTIONS if getattr(found, key)})
    return layers
