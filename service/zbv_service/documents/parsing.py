"""Strict readers of JSON and gzip bodies."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from zbv_solver.documents.files import unique
from zbv_solver.documents.validation import refusal
from zbv_solver.errors import InvalidInput

from zbv_service.errors import BODY_TOO_LARGE, MALFORMED_JSON, ApiError

MEDIUM_VALUES = 100_000
"""Largest number of values in the body of an agent."""

MAX_LEVELS = 100
"""Levels of a document; pydantic cannot write more than some 250."""
_ODD_TEXT = re.compile(rb"\\u(0000|d[89a-f])", re.IGNORECASE)
"""Escapes of NUL, which PostgreSQL cannot store, and of surrogates, which UTF-8 cannot encode alone."""

B = TypeVar("B", bound=BaseModel)


def parse_body(model: type[B], body: Any) -> B:
    """A request body as a document; raises :class:`zbv_solver.errors.InvalidInput`."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise refusal(error, body) from None


def parse_json(body: bytes | bytearray) -> Any:
    """Decode JSON.

    Raises
    ------
    ApiError
        400: it is not JSON, has NaN or infinities, or is nested too deeply.
    InvalidInput
        A text has characters that databases and responses cannot hold, or an object has a key twice.
    """
    try:
        document = json.loads(body.decode(), parse_constant=_refuse_constant, object_pairs_hook=unique)
    except UnicodeDecodeError as error:
        raise malformed(f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise malformed(f"line {error.lineno} column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise malformed("it is nested too deeply") from None
    except ValueError:
        # Python refuses to convert integers of more than some thousand digits.
        raise malformed("it contains an integer with thousands of digits") from None
    if body.count(b"[") + body.count(b"{") > MAX_LEVELS and is_deep(document, MAX_LEVELS):
        raise malformed(f"it is nested more than {MAX_LEVELS} levels deep")
    odd = next(_odd_texts(document), None) if _ODD_TEXT.search(body) else None
    if odd is not None:
        raise InvalidInput.at(odd, "found a text with NUL or half of a surrogate pair; remove it.")
    return document


def is_deep(document: Any, most: int) -> bool:
    """Whether a decoded document has more than so many levels of lists and objects."""
    level = [document]
    for _ in range(most):
        level = [value for each in level for value in _inside(each) if isinstance(value, dict | list)]
        if not level:
            return False
    return True


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _odd_texts(value: Any, pointer: str = "") -> Iterator[str]:
    """Pointers to texts that have NUL or half of a surrogate pair, and to objects with such a key."""
    if isinstance(value, str):
        if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
            yield pointer
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _odd_texts(key, pointer)
            yield from _odd_texts(inner, f"{pointer}/{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _odd_texts(inner, f"{pointer}/{index}")


def parse_medium(body: bytes | bytearray) -> Any:
    """As :func:`parse_json`; raises :class:`InvalidInput` for a document with too many values."""
    document = parse_json(body)
    # Every value follows a comma or an opening bracket. Strings may contain more of these.
    if sum(map(body.count, (b",", b"[", b"{"))) > MEDIUM_VALUES and has_more_values(document, MEDIUM_VALUES):
        raise InvalidInput.at("", f"found more than {MEDIUM_VALUES} values in one document; send fewer.")
    return document


def has_more_values(document: Any, most: int) -> bool:
    """Whether a decoded document has more than so many values; counts no further."""
    waiting, count = [document], 0
    while waiting and count <= most:
        count += 1
        waiting.extend(islice(_inside(waiting.pop()), most + 1))
    return count > most


def decompressed(body: bytes | bytearray, limit: int) -> bytes:
    """A gzip body's content, at most ``limit`` bytes of it; raises :class:`ApiError` 400 or 413."""
    stream = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        text = stream.decompress(body, limit + 1)
    except zlib.error as error:
        raise ApiError(MALFORMED_JSON, f"The body is not gzip: {error}. Compress it again.") from None
    if len(text) > limit:
        raise too_large(limit)
    if not stream.eof or stream.unused_data:
        raise ApiError(MALFORMED_JSON, "The body is not one whole gzip stream. Compress it again.")
    return text


def too_large(limit: int) -> ApiError:
    """The error of a body that is larger than ``limit`` bytes."""
    # The rest of the body is not read, so the connection cannot carry another request.
    return ApiError(
        BODY_TOO_LARGE, f"The body is larger than {limit} bytes; send less.", headers={"Connection": "close"}
    )


def malformed(what: str) -> ApiError:
    """The error of a body that is not JSON; ``what`` is the reason."""
    return ApiError(MALFORMED_JSON, f"The body is not JSON: {what}. Send one JSON document in UTF-8.")


def _refuse_constant(name: str) -> NoReturn:
    raise malformed(f"it contains {name}, which JSON does not have")
