"""Reading JSON request bodies: bounded, strict, and with errors that say what is wrong.

The framework's own body parsing is not used: it would accept NaN, and its messages would not be those
of the command line.
"""

from __future__ import annotations

import asyncio
import email.message
import json
import zlib
from typing import Any, NoReturn

from fastapi import Request
from starlette.requests import ClientDisconnect

from zbv_service.http.problems import (
    BODY_TOO_LARGE,
    BODY_TOO_SLOW,
    MALFORMED_JSON,
    UNSUPPORTED_MEDIA_TYPE,
    ProblemError,
)

SMALL = 64 * 1024
"""Bodies up to this many bytes are decoded in less time than handing them over takes."""
SLOWEST = 16 * 1024
"""Bytes per second: a body that comes more slowly than this, after a while, is not waited for."""


async def read_json(request: Request, limit: int) -> Any:
    """The decoded JSON body of a request, at most ``limit`` bytes of it.

    Raises
    ------
    ProblemError
        413 when it is larger, 415 when it is not declared as JSON, 400 when it is not JSON.
    """
    _require_json(request)
    body = await _read(request, limit)
    if len(body) <= SMALL:
        return parse_json(body)
    return await asyncio.to_thread(parse_json, body)  # seconds for the largest; others are served meanwhile


async def read_packed(request: Request, limit: int) -> bytes:
    """The body of a request, decompressed if it says that it is gzip, at most ``limit`` bytes of it.

    Raises
    ------
    ProblemError
        413 when it is larger, 415 for another encoding, 400 when it is not gzip.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip"):
        raise ProblemError(
            UNSUPPORTED_MEDIA_TYPE, f"found content encoding {encoding!r}; send it plain or as gzip."
        )
    body = await _read(request, limit)
    return body if encoding == "identity" else await asyncio.to_thread(_decompress, body, limit)


async def read_form(request: Request, limit: int) -> str:
    """The body of a form that a browser sends, still encoded, at most ``limit`` bytes of it.

    Raises
    ------
    ProblemError
        413 when it is larger, 415 when it is no such form.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise ProblemError(
            UNSUPPORTED_MEDIA_TYPE, f"found content type {kind!r}; send a form as a browser does."
        )
    return (await _read(request, limit)).decode("latin-1")


def _decompress(body: bytes, limit: int) -> bytes:
    stream = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        text = stream.decompress(body, limit + 1)
    except zlib.error as error:
        raise ProblemError(MALFORMED_JSON, f"The body is not gzip: {error}. Compress it again.") from None
    if len(text) > limit:
        raise _too_large(limit)
    if not stream.eof or stream.unused_data:
        raise ProblemError(MALFORMED_JSON, "The body is not one whole gzip stream. Compress it again.")
    return text


def parse_json(body: bytes) -> Any:
    """Strict JSON: UTF-8, no NaN or infinities, numbers and nesting within reason."""
    try:
        return json.loads(body.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise _malformed(f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _malformed(f"line {error.lineno} column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise _malformed("it is nested too deeply") from None
    except ValueError:
        # Python refuses to convert integers of more than some thousand digits.
        raise _malformed("it holds an integer with thousands of digits") from None


def _require_json(request: Request) -> None:
    header = request.headers.get("content-type", "")
    message = email.message.Message()
    message["content-type"] = header or "none"
    kind = message.get_content_type()
    if not header or not (kind == "application/json" or kind.endswith("+json")):
        raise ProblemError(
            UNSUPPORTED_MEDIA_TYPE, f"found content type {header!r}; send JSON as application/json."
        )


async def _read(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    parts, size, loop = [], 0, asyncio.get_running_loop()
    until = loop.time() + request.app.state.settings.request_seconds
    try:
        async with asyncio.timeout_at(until) as patience:
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                parts.append(part)
                patience.reschedule(until + size / SLOWEST)
    except TimeoutError:
        raise _too_slow(size) from None
    except ClientDisconnect:
        raise _malformed("it ends before its declared length") from None
    return b"".join(parts)


def _too_slow(size: int) -> ProblemError:
    return ProblemError(
        BODY_TOO_SLOW,
        f"Of the body {size} bytes came, and then no more for too long; send it again, faster.",
        headers={"Connection": "close"},
    )


def _too_large(limit: int) -> ProblemError:
    # The rest of the body is not read, so the connection cannot carry another request.
    return ProblemError(
        BODY_TOO_LARGE, f"The body is larger than {limit} bytes; send less.", headers={"Connection": "close"}
    )


def _malformed(what: str) -> ProblemError:
    return ProblemError(MALFORMED_JSON, f"The body is not JSON: {what}. Send one JSON document in UTF-8.")


def _refuse_constant(name: str) -> NoReturn:
    raise _malformed(f"it holds {name}, which JSON does not have")
