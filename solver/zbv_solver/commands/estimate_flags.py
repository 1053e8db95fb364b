"""The arguments of ``zbv estimate``: a flag for every key of a configuration that is no object."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from zbv_models.estimate.config_device import DeviceConfig
from zbv_models.estimate.config_model import ModelConfig
from zbv_models.estimate.config_parallel import ParallelConfig

from zbv_solver.commands.messages import flag_of

SECTIONS: dict[str, type[BaseModel]] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "device": DeviceConfig,
}
NONE = "none"
"""What undoes a value of a file or a preset, for keys that may be absent."""


def flags(section: str) -> dict[str, FieldInfo]:
    """The keys of a section that have a flag: all but objects."""
    fields = SECTIONS[section].model_fields
    scalars = {int, float, bool, str}
    return {key: field for key, field in fields.items() if _kinds(field) & scalars or listed(field)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``zbv estimate``."""
    parser.description = (
        "Estimate the layers of a transformer from its configuration: times, activations and static memory, "
        "as a problem for zbv plan. docs/estimates.md explains every key and formula."
    )
    parser.add_argument("--config", metavar="FILE", help="model, parallel and device (JSON), or -")
    parser.add_argument(
        "--preset",
        action="append",
        default=[],
        metavar="NAME",
        help="start from a model or device that zbv knows; may be repeated",
    )
    parser.add_argument("--list-presets", action="store_true", help="list the presets, then exit")
    parser.add_argument("--table", action="store_true", help="also print tables of layers and memory")
    parser.add_argument("-o", "--output", default="-", metavar="FILE", help="problem file (default: -)")
    for section in SECTIONS:
        group = parser.add_argument_group(
            f"{section}: replaces values of the file and the presets; none undoes a value that may be absent"
        )
        for key, field in flags(section).items():
            shown: dict[str, Any] = {"dest": f"{section}.{key}", "default": argparse.SUPPRESS}
            if bool in _kinds(field):
                action = argparse.BooleanOptionalAction
                group.add_argument(flag_of(key), **shown, action=action, help=_help(field))
            elif listed(field):
                add_words(group, key, field, **shown)
            else:
                group.add_argument(
                    flag_of(key), **shown, type=_reader(field), metavar=_metavar(field), help=_help(field)
                )


def add_words(parser: argparse._ActionsContainer, key: str, field: FieldInfo, **more: Any) -> None:
    """The flag of a list of words."""
    accepted = listed(field)
    shown = f"{_help(field)}: {', '.join(accepted)}"
    parser.add_argument(flag_of(key), nargs="+", choices=accepted, metavar="WORD", help=shown, **more)


def listed(field: FieldInfo) -> list[str]:
    """The words that a list accepts; empty for other types."""
    lists = [get_args(each)[0] for each in _alternatives(field.annotation) if get_origin(each) is tuple]
    return [word for each in lists if get_origin(each) is Literal for word in get_args(each)]


def _alternatives(annotation: Any) -> list[Any]:
    """The types and literals of an annotation."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _alternatives(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [each for part in get_args(annotation) for each in _alternatives(part)]
    return [annotation]


def _kinds(field: FieldInfo) -> set[Any]:
    """The types of a field; ``str`` also for words."""
    return {str if get_origin(each) is Literal else each for each in _alternatives(field.annotation)}


def words(field: FieldInfo) -> list[str]:
    """The words that a key accepts; empty for other types."""
    literals = [each for each in _alternatives(field.annotation) if get_origin(each) is Literal]
    return [word for each in literals for word in get_args(each)]


def _help(field: FieldInfo) -> str:
    return (field.description or "").replace("%", "%%")


def _metavar(field: FieldInfo) -> str:
    kinds, accepted = _kinds(field), words(field)
    named = accepted or [{int: "INT", float: "FLOAT"}.get(next(iter(kinds - {NoneType})), "LETTERS")]
    return "|".join([*named, NONE] if NoneType in kinds and NONE not in accepted else named)


def _reader(field: FieldInfo) -> Callable[[str], Any]:
    """Reads a flag's value; ``none`` is the absent value where the key may be absent."""
    kinds = _kinds(field)
    of_type: Callable[[str], Any] = int if int in kinds else float if float in kinds else str

    def read(text: str) -> Any:
        if text == NONE and NoneType in kinds and NONE not in words(field):
            return None
        return of_type(text)

    read.__name__ = of_type.__name__  # argparse names it in its errors
    return read
