"""``zbv-service settings`` and ``openapi``, the flags of ``serve``, and the documentation of settings.

The settings are those that :mod:`zbv_service.settings` declares. Functions import it when they are called,
because it needs packages that a machine with only the client does not have.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from zbv_solver.commands.parser import Parser

from zbv_service.commands.arguments import DONE, WrongInput, flag_of

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from zbv_service.settings import Settings

_UNITS = {"seconds": "SECONDS", "bytes": "BYTES", "hours": "HOURS"}
_KINDS = {"host": "ADDRESS", "database": "URL", "cert": "FILE", "key": "FILE", "ca": "FILE"}


class Command(Parser):
    """A command that may have a list after its arguments."""

    rest: str | None = None
    """The name of a list that gets everything after ``--``; None leaves ``--`` to argparse, which cannot
    tell an optional argument before it from those after it."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and keep what follows ``--``."""
        if self.rest is None or args is None:
            return super().parse_known_args(args, namespace)
        own, _, rest = _partition(list(args), "--")
        found, unknown = super().parse_known_args(own, namespace)
        setattr(found, self.rest, rest)
        return found, unknown


def _partition(words: list[str], at: str) -> tuple[list[str], list[str], list[str]]:
    """As ``str.partition``, for lists."""
    place = words.index(at) if at in words else len(words)
    return words[:place], words[place : place + 1], words[place + 1 :]


@dataclass(frozen=True)
class Declared:
    """A setting."""

    name: str
    description: str
    default: str
    """As text for people."""
    choices: tuple[str, ...]
    kind: type = str

    @property
    def flag(self) -> str:
        """The flag of ``zbv-service serve``."""
        return flag_of(self.name)

    @property
    def variable(self) -> str:
        """The environment variable."""
        return "ZBV_" + self.name.upper()


def declared() -> Iterator[Declared]:
    """All settings, in the order of declaration."""
    from zbv_service.settings import Settings

    for name, field in Settings.model_fields.items():
        choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        kinds = {field.annotation, *get_args(field.annotation)}
        kind = next((kind for kind in (int, float) if kind in kinds), str)
        yield Declared(name, str(field.description), _default(field), tuple(map(str, choices)), kind)


def add_flags(command: argparse.ArgumentParser, *only: str) -> None:
    """Add the flags of all settings, or of those in ``only``."""
    for setting in declared():
        if only and setting.name not in only:
            continue
        command.add_argument(
            setting.flag,
            type=setting.kind,
            choices=setting.choices or None,
            metavar=None if setting.choices else _metavar(setting),
            help=f"{setting.description} Default: {setting.default}.".replace("%", "%%"),
        )


def settings_of(parsed: argparse.Namespace) -> Settings:
    """The settings from flags, variables and defaults; raises :class:`WrongInput`."""
    from pydantic import ValidationError

    from zbv_service.settings import Settings

    given = {name: getattr(parsed, name, None) for name in Settings.model_fields}
    try:
        return Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        lines = [f"{_place(entry)}{_rule(entry)}" for entry in error.errors()]
        raise WrongInput("\n  ".join(lines)) from None


def markdown() -> str:
    """The table in ``docs/configuration.md``."""
    lines = [
        "| setting | flag of `serve` | variable | default | meaning |",
        "| --- | --- | --- | --- | --- |",
    ]
    for setting in declared():
        meaning = setting.description.replace("|", "\\|")
        if setting.choices:
            meaning += f" One of {', '.join(f'`{choice}`' for choice in setting.choices)}."
        lines.append(
            f"| `{setting.name}` | `{setting.flag}` | `{setting.variable}` | {setting.default} | {meaning} |"
        )
    return "\n".join(lines) + "\n"


def add_settings(commands: Any) -> None:
    """Add the command."""
    command = commands.add_parser(
        "settings",
        help="show every setting of the service",
        description="Show every setting with its value from the environment, or else its default.",
        epilog="example: ZBV_SEARCHES=8 zbv-service settings",
    )
    command.add_argument("--markdown", action="store_true", help="print the table of docs/configuration.md")
    command.set_defaults(run=_show)


def _show(parsed: argparse.Namespace) -> int:
    if parsed.markdown:
        print(markdown(), end="")
        return DONE
    from zbv_service.settings import shown_url

    settings = settings_of(parsed)
    rows = [(setting.variable, getattr(settings, setting.name), setting) for setting in declared()]
    width = max(len(variable) for variable, _, _ in rows)
    for variable, value, setting in rows:
        if setting.name == "database":
            value = shown_url(value)
        elif isinstance(value, tuple):
            value = ",".join(value)
        print(f"{variable:{width}}  {'-' if value in (None, '') else value}")
        print(f"{'':{width}}    {setting.description}")
    return DONE


def _default(field: FieldInfo) -> str:
    more = field.json_schema_extra
    if isinstance(more, dict) and "shown_default" in more:
        return str(more["shown_default"])
    value = field.get_default(call_default_factory=True)
    if value is None or value == ():
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _metavar(setting: Declared) -> str:
    last = setting.name.rpartition("_")[2]
    if last in _UNITS:
        return _UNITS[last]
    return "N" if setting.kind in (int, float) else _KINDS.get(last, "VALUE")


def _place(entry: Any) -> str:
    if not entry["loc"]:  # a rule about several settings, whose message names them
        return ""
    name = str(entry["loc"][0])
    found = "" if _rule(entry).startswith("found ") else f"found {entry['input']!r}; "
    return f"{flag_of(name)} (ZBV_{name.upper()}): {found}"


def _rule(entry: Any) -> str:
    text = str(entry["msg"]).removeprefix("Value error, ").replace("Input should", "must", 1)
    return f"{text.rstrip('.')}."


def add_openapi(commands: Any) -> None:
    """Add the command."""
    openapi = commands.add_parser(
        "openapi",
        help="print the API's OpenAPI document",
        description="Print the API's OpenAPI document (JSON).",
        epilog="example: zbv-service openapi > openapi.json",
    )
    openapi.set_defaults(run=_openapi)


def _openapi(_parsed: argparse.Namespace) -> int:
    from zbv_service.app import create_app

    print(json.dumps(create_app().openapi(), indent=2, ensure_ascii=False))
    return DONE
