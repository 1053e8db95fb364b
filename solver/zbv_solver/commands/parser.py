"""The argument parser of the three programs: that of argparse, with suggestions and completion in shells."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any, NoReturn

from zbv_solver._version import __version__
from zbv_solver.errors import did_you_mean

_SHELLS = ("bash", "zsh", "fish")


class _Help(argparse.HelpFormatter):
    """Wraps descriptions, except indented lines: examples and tables."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        found: list[str] = []
        for is_kept, group in groupby(text.splitlines(), key=lambda line: line[:1] in ("", " ")):
            lines = list(group)
            found += lines if is_kept else [super()._fill_text(" ".join(lines), width, indent)]
        return "\n".join(found)


class Parser(argparse.ArgumentParser):
    """A parser that suggests words like unknown ones, and whose flags may be added when it is used."""

    on_use: Callable[[Any], None] | None = None
    """Adds flags whose description needs imports that other commands can do without."""
    is_used = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"formatter_class": _Help, **options})
        self.offered: dict[str, Callable[[], Iterable[str]]] = {}
        """Words that a shell completes after a flag which checks its value later."""

    def add_common_flags(self) -> None:
        """The flags of every program."""
        self.add_argument("--version", action="version", version=f"{self.prog} {__version__}")
        self.add_argument(
            "--print-completion",
            action=_PrintCompletion,
            choices=_SHELLS,
            help="print the script that completes this program's commands, flags and files in a shell",
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse what is known, after adding the flags."""
        self.is_used = True
        self._add_flags_of_use()
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        """The help, with all flags of this command."""
        self._add_flags_of_use()
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Exit with a message; a wrong choice or an unknown flag gets a suggestion."""
        if wrong := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            hint = did_you_mean(wrong[1], re.findall(r"[\w.-]+", wrong[2]))
        else:
            words, known = message.partition("unrecognized arguments: ")[2].split(), [*self._flags()]
            hint = "".join(did_you_mean(word.partition("=")[0], known) for word in words)
        # An unknown flag of a command is found by the program, whose own usage does not help.
        argparse.ArgumentParser.error(self._used()[-1], f"{message}{'.' if hint else ''}{hint}")

    def prepare_completion(self) -> None:
        """Add all flags of all commands, and mark the arguments whose words or files a shell completes."""
        import shtab

        self._add_flags_of_use()
        files = {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY}
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for command in action.choices.values():
                    command.prepare_completion()
                continue
            shown = action.metavar if isinstance(action.metavar, str) else ""
            for flag in action.option_strings:
                if flag in self.offered:
                    action.choices = tuple(self.offered[flag]())
            if action.choices is None and "|" in shown and not shown.isupper():
                action.choices = shown.split("|")
            kind = shown if action.option_strings or shown.isupper() else "FILE"
            if action.choices is None and action.nargs != 0 and kind in files:
                vars(action)["complete"] = files[kind]

    def _add_flags_of_use(self) -> None:
        if self.on_use is not None:
            add, self.on_use = self.on_use, None
            add(self)

    def _flags(self) -> Iterator[str]:
        """The flags of this parser, and of the commands that are used."""
        for parser in self._used():
            yield from parser._option_string_actions

    def _used(self) -> list[Parser]:
        """This parser, the command that is used, and its own, if there are any."""
        choices = (action.choices for action in self._actions if isinstance(action.choices, dict))
        commands = (command for each in choices for command in each.values())
        used = next((it for it in commands if isinstance(it, Parser) and it.is_used), None)
        return [self] if used is None else [self, *used._used()]


class _PrintCompletion(argparse.Action):
    """Print a completion script, and exit."""

    def __call__(self, parser: Any, _namespace: object, values: Any, _flag: str | None = None) -> None:
        import shtab  # here, because no other use of a program needs it

        parser.prepare_completion()
        print(shtab.complete(parser, values))
        parser.exit()
