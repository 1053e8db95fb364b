"""Files that commands read and write; ``-`` stands for standard input or output."""

from __future__ import annotations

import errno
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zbv_solver.errors import InvalidInput

if TYPE_CHECKING:
    from zbv_solver.problem.layered_problem import LayeredProblem
    from zbv_solver.problem.problem import Problem

Write = Callable[[str], None]


def read_question(path: str) -> Problem | LayeredProblem:
    """The problem in a file, by stages or by layers still to be cut; raises :class:`InvalidInput`."""
    from zbv_solver.problem.reading import parse_question

    return parse_question(read_json(path))


def read_json(path: str) -> Any:
    """The JSON document in a file; raises :class:`InvalidInput` where it holds none."""
    from zbv_solver.problem.stage_document import decode_json

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


@contextmanager
def output(path: str | Path, *, private: bool = False) -> Iterator[Write]:
    """Open an output file before the work that fills it starts, and replace its content as a whole.

    The text goes to a file of another name in the same directory, which takes the output's name once it is
    complete and on disk. So a path that cannot be written fails before the work, and whatever ends the work
    (an error, Ctrl-C, a crash, a full disk) leaves an existing file as it was. Devices and pipes are written
    to directly, as nothing can replace them.

    Parameters
    ----------
    private
        Whether only the user may read the file, also where the file that it replaces had other readers.

    Yields
    ------
    The function that writes the whole text; the last call counts.

    Raises
    ------
    OSError
        When the path cannot be written; ``filename`` is the path as given.
    """
    if str(path) == "-":
        yield _write_standard_output
        return
    given = Path(path)
    # A symbolic link stays one. What /dev/fd/3 resolves to is no path.
    target = given.resolve() if given.is_file() or not given.exists() else given
    try:
        partial = _reserve(target, 0o600 if private else 0o666)
    except OSError as error:
        raise _named(error, path) from None
    try:
        yield lambda text: _replace(target, partial, text, path, keeps_mode=not private)
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)


def _reserve(target: Path, mode: int) -> Path | None:
    """An empty file next to the target; None where the target must be written to directly."""
    if target.exists():
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if not (target.is_file() and os.access(target.parent, os.W_OK)):
            return None
    partial = target.with_name(f".{target.name[:100]}.{secrets.token_hex(6)}.part")
    os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    return partial


def write(path: str | Path, text: str) -> None:
    """Write a text that is there already, as :func:`output` does."""
    with output(path) as write_text:
        write_text(text)


def _write_standard_output(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _replace(target: Path, partial: Path | None, text: str, path: str | Path, *, keeps_mode: bool) -> None:
    try:
        if partial is None:
            target.write_text(text, encoding="utf-8")
            return
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if keeps_mode:
            with suppress(FileNotFoundError):
                partial.chmod(target.stat().st_mode & 0o7777)
        os.replace(partial, target)
    except OSError as error:
        raise _named(error, path) from None


def _named(error: OSError, path: str | Path) -> OSError:
    """The same error, with the path that the user gave."""
    return type(error)(error.errno, error.strerror, str(path))
