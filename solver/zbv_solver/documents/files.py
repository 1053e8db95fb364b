"""JSON text and files: how zbv reads and writes them.

Documents are read whole, and outputs are replaced whole. ``-`` is standard input or output.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from zbv_solver.errors import InvalidInput, Issue

T = TypeVar("T")
Write = Callable[[str], None]
_MOST_DIGITS = 100
"""Longer integers are read as floats: no field accepts a number that large."""


def canonical_json(document: Any) -> str:
    """The text of a document that hashes are computed from: sorted keys, no white space, UTF-8."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def decode_json(text: str) -> Any:
    """Parse JSON text.

    A number that no float can hold becomes inf, even an integer of thousands of digits, which Python itself
    refuses to parse. The document's validation can then name the offending field.

    Raises :class:`json.JSONDecodeError` when the text is not JSON, and :class:`InvalidInput` when a key is
    there twice.
    """
    return json.loads(text, parse_int=_integer, object_pairs_hook=unique)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The JSON object with these keys, of which Python alone would take the last of equal ones.

    Raises :class:`InvalidInput` when a key is there twice.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        key = json.dumps(counts.most_common(1)[0][0])
        raise InvalidInput.at("", f"found the key {key} twice in one object. Remove one of them.")
    return found


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MOST_DIGITS else float(digits)


def plain(value: Any) -> Any:
    """A dataclass as JSON values: its fields in their order, sequences as lists, infinity as null.

    Whole numbers have no fraction (:func:`number`). Callers of the library may give any sequence of any
    numbers, such as a list or a NumPy array: the text, and a plan's identity with it, stays the same.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Iterable):
        return [plain(each) for each in value]
    return number(value) if math.isfinite(value) else None


def number(value: float) -> float | int:
    """A float in its shortest JSON form: whole numbers without a fraction."""
    return int(value) if value == int(value) else value


def numbers(values: Sequence[float]) -> list[float | int]:
    """Apply :func:`number` to a sequence."""
    return [number(value) for value in values]


def read_text(path: str | Path) -> str:
    """Read a text; raises :class:`InvalidInput` when the file is not UTF-8."""
    try:
        return sys.stdin.read() if str(path) == "-" else Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InvalidInput([Issue("", "the file is not UTF-8 text.", file_label(path))]) from None


def read_json(path: str | Path) -> Any:
    """Read a JSON document; raises :class:`InvalidInput` when the file is not JSON."""
    return parse_json(read_text(path), path)


def parse_json(text: str, path: str | Path) -> Any:
    """The JSON document in a file's text; raises :class:`InvalidInput` naming the file."""
    try:
        return decode_json(text)
    except InvalidInput as error:
        raise error.found_in(file_label(path)) from None
    except json.JSONDecodeError as error:
        found = f"the file is not JSON: {error.msg} at line {error.lineno}, column {error.colno}."
    except RecursionError:
        found = "the JSON document is nested too deeply."
    raise InvalidInput([Issue("", found, file_label(path))])


def load(path: str | Path, parse: Callable[[Any], T]) -> T:
    """Read a JSON document and parse it; errors of both name the file.

    Raises :class:`InvalidInput` when the file is not JSON, or when ``parse`` raises it, and :class:`OSError`
    when the file cannot be read.
    """
    document = read_json(path)
    try:
        return parse(document)
    except InvalidInput as error:
        raise error.found_in(file_label(path)) from None


def file_label(path: str | Path) -> str:
    """How messages name a file that is read."""
    return "standard input" if str(path) == "-" else str(path)


@contextmanager
def output(path: str | Path, *, private: bool = False) -> Iterator[Write]:
    """Open an output file before the work that produces its content, and replace the file atomically.

    The text is written to a temporary file in the same directory, which is renamed once it is complete and on
    disk. A path that cannot be written therefore fails before the work starts, and an error, Ctrl-C, a crash
    or a full disk leaves an existing file unchanged. Devices and pipes cannot be replaced, so they are
    written directly.

    Parameters
    ----------
    private
        Whether only the user may read the file, even if the replaced file had other readers.

    Yields
    ------
    The function that writes the whole text; each call replaces the text of the call before.

    Raises
    ------
    OSError
        When the path cannot be written; ``filename`` is the path as given.
    """
    if str(path) == "-":
        yield _write_standard_output
        return
    given = Path(path)
    # A symbolic link stays a link. /dev/fd/3 does not resolve to a path.
    target = given.resolve() if given.is_file() or not given.exists() else given
    mode = 0o600 if private else 0o666
    try:
        partial = _reserve(target, mode)
    except OSError as error:
        raise _named(error, path) from None
    try:
        yield lambda text: _replace(target, partial, text, path, mode)
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)


def _reserve(target: Path, mode: int) -> Path | None:
    """Create an empty temporary file next to the target; None if the target must be written directly."""
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
    """Write a text atomically, as :func:`output` does."""
    with output(path) as write_text:
        write_text(text)


def _write_standard_output(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _replace(target: Path, partial: Path | None, text: str, path: str | Path, mode: int) -> None:
    try:
        if partial is None:
            target.write_text(text, encoding="utf-8")
            return
        # A second text finds no partial file, and must not be created with more rights than the first.
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if mode != 0o600:
            with suppress(FileNotFoundError):
                partial.chmod(target.stat().st_mode & 0o7777)
        os.replace(partial, target)
    except OSError as error:
        raise _named(error, path) from None


def _named(error: OSError, path: str | Path) -> OSError:
    """The same error with the path that the user gave."""
    return type(error)(error.errno, error.strerror, str(path))
