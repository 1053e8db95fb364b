"""Settings as flags, as a table, and ``zbv-service settings``: all from their one declaration.

The declaration needs packages that a machine without a service does not have, so nothing is imported from it
before a command asks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from zbv_service.commands.ending import DONE, WRONG_INPUT, Stop

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from zbv_service.settings import Settings

_UNITS = {"seconds": "SECONDS", "bytes": "BYTES", "hours": "HOURS"}
_KINDS = {"host": "ADDRESS", "database": "URL", "cert": "FILE", "key": "FILE", "ca": "FILE"}


class Command(argparse.ArgumentParser):
    """A command whose flags are added when it is chosen."""

    on_use: Callable[[Command], None] | None = None

    def parse_known_args(self, *arguments: Any, **more: Any) -> Any:
        """Add what is still to be added, and parse."""
        if self.on_use is not None:
            add, self.on_use = self.on_use, None
            add(self)
        return super().parse_known_args(*arguments, **more)


@dataclass(frozen=True)
class Declared:
    """A setting.

    Attributes
    ----------
    default
        As people read it.
    """

    name: str
    description: str
    default: str
    choices: tuple[str, ...]
    kind: type = str

    @property
    def flag(self) -> str:
        """On the command line of ``zbv-service serve``."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """In the environment."""
        return "ZBV_" + self.name.upper()


def declared() -> Iterator[Declared]:
    """Every setting, in the order of its declaration."""
    from zbv_service.settings import Settings

    for name, field in Settings.model_fields.items():
        choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        kinds = {field.annotation, *get_args(field.annotation)}
        kind = next((kind for kind in (int, float) if kind in kinds), str)
        yield Declared(name, str(field.description), _default(field), tuple(map(str, choices)), kind)


def add_flags(command: argparse.ArgumentParser, *only: str) -> None:
    """Add the flags of all settings, or of some."""
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
    """The settings that flags, variables and defaults give; raises :class:`Stop`."""
    from pydantic import ValidationError

    from zbv_service.settings import Settings

    given = {name: getattr(parsed, name, None) for name in Settings.model_fields}
    try:
        return Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        lines = [f"  {_place(entry)}{entry['msg'].removeprefix('Value error, ')}" for entry in error.errors()]
        raise Stop(WRONG_INPUT, "\n".join(["a setting is wrong (flag or ZBV_ variable):", *lines])) from None


def markdown() -> str:
    """The table of all settings in ``docs/configuration.md``."""
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
        description="Show every setting, with the value that variables and defaults give it here.",
    )
    command.add_argument("--markdown", action="store_true", help="as the table in docs/configuration.md")
    command.set_defaults(run=_show)


def _show(parsed: argparse.Namespace) -> int:
    if parsed.markdown:
        print(markdown(), end="")
        return DONE
    from zbv_service.database.url import shown_url

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
    where = ".".join(map(str, entry["loc"]))
    return f"{where}: found {entry['input']!r}; " if where else ""
