"""Reading and writing the files that a command's arguments name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from zbv_solver.documents import files
from zbv_solver.documents.files import Write
from zbv_solver.documents.validation import require_kind
from zbv_solver.errors import InvalidInput

from zbv_service.commands.ending import WrongInput


def read_problem(name: str) -> Any:
    """As :func:`read_json`; also raises :class:`WrongInput` for a plan, a batch or a packing."""
    document = read_json(name)
    try:
        require_kind(document, "problem")
    except InvalidInput as error:
        raise WrongInput(f"{files.file_label(name)}: {error.issues[0].detail}") from None
    return document


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
