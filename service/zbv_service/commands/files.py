"""Reading and writing the files that commands name."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from zbv_solver.documents import files
from zbv_solver.documents.files import Write

from zbv_service.commands.ending import WRONG_INPUT, Stop


def read_json(name: str) -> Any:
    """The JSON document of a file; ``-`` is standard input."""
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise Stop(WRONG_INPUT, f"cannot read {name}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise Stop(WRONG_INPUT, f"{name} is not UTF-8 text; it must be a JSON document.") from None
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Stop(WRONG_INPUT, f"{name} is not JSON: {error}.") from None


def require_finite(*documents: Any) -> None:
    """Raise :class:`Stop` when documents hold numbers that JSON does not have."""
    try:
        json.dumps(documents, allow_nan=False)
    except ValueError:
        raise Stop(
            WRONG_INPUT, "found a number that is not finite, such as nan or 1e999; JSON has none."
        ) from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it holds {name}, which JSON does not have")


@contextmanager
def output(name: str, *, private: bool = False) -> Iterator[Write]:
    """As :func:`zbv_solver.documents.files.output`; raises :class:`Stop` where the file cannot be written."""
    with ExitStack() as stack:
        try:
            write = stack.enter_context(files.output(name, private=private))
        except OSError as error:
            raise Stop(WRONG_INPUT, f"cannot write {name}: {error.strerror}.") from None
        yield write
