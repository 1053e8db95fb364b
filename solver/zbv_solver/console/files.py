"""Files that commands read and write; ``-`` stands for standard input or output."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zbv_solver.errors import InvalidInput

if TYPE_CHECKING:
    from zbv_solver.layers.layered_problem import LayeredProblem
    from zbv_solver.problem import Problem


def read_question(path: str) -> Problem | LayeredProblem:
    """The problem in a file, by stages or by layers still to be cut; raises :class:`InvalidInput`."""
    from zbv_solver.layers.reading import parse_question

    return parse_question(read_json(path))


def read_json(path: str) -> Any:
    """The JSON document in a file; raises :class:`InvalidInput` where it holds none."""
    from zbv_solver.schema import decode_json

    name = shown(path)
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
        return decode_json(text)
    except UnicodeDecodeError:
        raise InvalidInput.at("", f"{name} is not UTF-8 text; it must be a JSON document.") from None
    except json.JSONDecodeError as error:
        raise InvalidInput.at(
            "", f"{name} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from None
    except RecursionError:
        raise InvalidInput.at("", f"{name} is nested too deeply to be a problem or a plan.") from None


def shown(path: str) -> str:
    """A file as messages name it."""
    return "standard input" if path == "-" else path


def write(path: str, text: str) -> None:
    """Write a text to a file."""
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")
