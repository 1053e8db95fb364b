"""The argument parser of ``zbv``, ``zbv-service`` and ``zbv-worker``: argparse's, with suggestions."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from zbv_solver.errors import did_you_mean


class Parser(argparse.ArgumentParser):
    """A parser that suggests words like unknown ones, and whose flags may be added when it is used."""

    on_use: Callable[[Any], None] | None = None
    """Adds flags whose description needs imports that other commands can do without."""
    is_used = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse what is known, after adding the flags."""
        self.is_used = True
        if self.on_use is not None:
            add, self.on_use = self.on_use, None
            add(self)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Exit with a message; a wrong choice or an unknown flag gets a suggestion."""
        if wrong := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            hint = did_you_mean(wrong[1], re.findall(r"[\w.-]+", wrong[2]))
        else:
            words, known = message.partition("unrecognized arguments: ")[2].split(), [*self._flags()]
            hint = "".join(did_you_mean(word.partition("=")[0], known) for word in words)
        super().error(f"{message}{'.' if hint else ''}{hint}")

    def _flags(self) -> Iterator[str]:
        """The flags of this parser, and of the commands that are used."""
        yield from self._option_string_actions
        for action in self._actions:
            for command in action.choices.values() if isinstance(action.choices, dict) else ():
                if isinstance(command, Parser) and command.is_used:
                    yield from command._flags()
