"""What commands share: types of arguments, files, the connection to a service, and how a command ends.

Argparse adds the flag's name to the messages of the types of arguments.
"""

from __future__ import annotations

import json
import signal
from argparse import ArgumentTypeError
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zbv_solver.documents import files
from zbv_solver.documents.files import Write
from zbv_solver.errors import InvalidInput

if TYPE_CHECKING:
    from zbv_service.client import Client, InvalidRequest

DONE, FAILED, WRONG_INPUT, INFEASIBLE = 0, 1, 2, 3
"""Exit statuses. ``zbv`` has the same, except for FAILED."""
INTERRUPTED = 128 + signal.SIGINT

EPILOG = """\
exit status: 0 done; 1 the service cannot be reached or failed; 2 the input is wrong;
3 no plan fits the memory limit; 130 interrupted."""


class Stop(Exception):
    """Ends a command with a message and a status."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class WrongInput(Stop):
    """Ends a command because its input is wrong. The message names the flag or file and says what to do."""

    def __init__(self, message: str):
        super().__init__(WRONG_INPUT, message)


def flag_of(name: str) -> str:
    """The flag for a setting or an option of the API: ``--time-limit`` for ``time_limit``."""
    return "--" + name.replace("_", "-")


def finite(text: str) -> float:
    """A number that is neither infinite nor NaN."""
    try:
        found = float(text)
    except ValueError:
        found = float("nan")
    if not isfinite(found):
        raise ArgumentTypeError(f"found {text!r}; must be a finite number.")
    return found


def at_least_one(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"found {text!r}; must be a whole number of at least 1.")
    return int(text)


def json_object(text: str) -> dict[str, Any]:
    """A JSON object without NaN or infinite numbers."""
    try:
        found = json.loads(text)
        json.dumps(found, allow_nan=False)
    except ValueError as error:
        raise ArgumentTypeError(f"found {text!r}, which is not JSON ({error}); {_EXAMPLE}") from None
    if not isinstance(found, dict):
        raise ArgumentTypeError(f"found {text!r}; {_EXAMPLE}")
    return found


_EXAMPLE = "must be a JSON object such as '{\"layers\": 8}'."


def read_problem(name: str) -> Any:
    """As :func:`read_json`, with the files that layers may be in.

    Also raises :class:`WrongInput` for a plan, a batch or a packing, and for wrong files of layers.
    """
    from zbv_solver.documents.layer_table import with_files_read
    from zbv_solver.documents.validation import require_kind

    document = read_json(name)
    try:
        require_kind(document, "problem")
        return with_files_read(document, Path(name).parent)
    except InvalidInput as error:
        raise WrongInput(str(error.found_in(files.file_label(name)))) from None
    except OSError as error:
        raise WrongInput(f"cannot read {error.filename}: {error.strerror}.") from None


def read_json(name: str) -> Any:
    """The JSON document in a file, or in standard input for ``-``; raises :class:`WrongInput`."""
    try:
        document = files.read_json(name)
    except OSError as error:
        raise WrongInput(f"cannot read {name}: {error.strerror}.") from None
    except InvalidInput as error:
        raise WrongInput(error.issues[0].detail) from None
    try:
        json.dumps(document, allow_nan=False)
    except ValueError:
        raise WrongInput(
            f"{files.file_label(name)} contains a number that is not finite, such as NaN or 1e999. Use "
            f"finite numbers only."
        ) from None
    return document


@contextmanager
def output(name: str, *, private: bool = False) -> Iterator[Write]:
    """:func:`zbv_solver.documents.files.output`, except that it raises :class:`WrongInput`."""
    with ExitStack() as stack:
        try:
            write = stack.enter_context(files.output(name, private=private))
        except OSError as error:
            raise WrongInput(f"--output: cannot write {name}: {error.strerror}.") from None
        yield write


def print_table(headings: Sequence[str], rows: Iterable[Iterable[str]]) -> None:
    """Print a table to standard output."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)


_NOT_THE_INPUT = frozenset({401, 403, 404, 409, 410, 421, 429})
"""Statuses that are about the caller, the object or the moment, not about the input."""


@contextmanager
def connected(server: str) -> Iterator[Client]:
    """A client of the service; its errors end the command with the status :data:`FAILED`."""
    from zbv_service.client import Client, ClientError

    with Client(server) as client:
        try:
            yield client
        except ClientError as error:
            raise Stop(FAILED, str(error)) from None


def refused(error: InvalidRequest, sources: Mapping[str, str]) -> Stop:
    """How a command ends after its request was refused.

    Parameters
    ----------
    sources
        For the pointer of a part of the request, the flag or the file that it comes from. The message
        replaces the longest matching pointer by it.
    """
    if error.status in _NOT_THE_INPUT:
        return Stop(FAILED, str(error))
    lines = [f"{_named(issue.pointer, sources)}: {issue.detail}" for issue in error.issues]
    return WrongInput("\n  ".join(lines or [error.detail]))


def _named(pointer: str, sources: Mapping[str, str]) -> str:
    known = [start for start in sources if pointer == start or pointer.startswith(f"{start}/")]
    if not known:
        return pointer
    start = max(known, key=len)
    rest = pointer.removeprefix(start)
    return f"{sources[start]}: {rest}" if rest else sources[start]
