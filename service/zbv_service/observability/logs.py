"""Log lines as text or as one JSON object per line, with the ids of requests and without secrets."""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from zbv_service.observability.context import REQUEST_ID, SEARCH_ID

LogFormat = Literal["auto", "text", "json"]

_NOISY = ("alembic", "aiosqlite", "asyncio", "httpx", "httpcore")
_SECRETS = re.compile(r"(?i)(\btoken=|\bbearer\s+|\"authorization\":\s*\"|\bauthorization:\s*)[^\s&\"',;]+")
_TOKENS = re.compile(r"\b(zbv_[0-9a-f]{12}_)[A-Za-z0-9_-]{43}")
"""The service's own tokens, anywhere in a text. The token's id remains readable."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}
"""Attributes of every record; all others come from ``extra``."""


def configure(level: str, log_format: LogFormat = "auto", stream: TextIO | None = None) -> None:
    """Send the log lines of this process to standard error.

    Parameters
    ----------
    log_format
        ``auto`` means ``text`` on a terminal and ``json`` elsewhere.
    """
    stream = stream or sys.stderr
    wants_text = log_format == "text" or (log_format == "auto" and stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TextLines() if wants_text else JsonLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in _NOISY:
        logging.getLogger(noisy).setLevel(logging.WARNING)


def redact(text: str) -> str:
    """Replace tokens, and the word after ``token=``, ``Bearer`` or ``Authorization:``, in a text."""
    return _TOKENS.sub(r"\1[redacted]", _SECRETS.sub(r"\1[redacted]", text))


class JsonLines(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """``time``, ``level``, ``logger``, ``message``, the ids, the members of ``extra``, ``exception``."""
        line: dict[str, Any] = {
            "time": _moment(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redact(record.getMessage()),
            **_ids(record),
            **{name: value for name, value in vars(record).items() if name not in _OWN | set(_IDS)},
        }
        if record.exc_info:
            line["exception"] = redact(self.formatException(record.exc_info))
        if record.stack_info:
            line["stack"] = redact(record.stack_info)
        return json.dumps(line, default=str)


class TextLines(logging.Formatter):
    """A line for people, with the ids in brackets at its end."""

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, logger, message, ids, and the traceback on the following lines."""
        ids = " ".join(f"{name.removesuffix('_id')}={value}" for name, value in _ids(record).items())
        moment, ending = _moment(record), f" [{ids}]" if ids else ""
        # A message may quote a request. It must not forge another line or send commands to the terminal.
        message = _CONTROL.sub(lambda found: ascii(found[0])[1:-1], redact(record.getMessage()))
        text = f"{moment} {record.levelname.lower()} {record.name}: {message}{ending}"
        if record.exc_info:
            text += "\n" + redact(self.formatException(record.exc_info))
        return text


_IDS = {"request_id": REQUEST_ID, "search_id": SEARCH_ID}


def _ids(record: logging.LogRecord) -> dict[str, str]:
    found = {name: getattr(record, name, None) or variable.get() for name, variable in _IDS.items()}
    return {name: value for name, value in found.items() if value is not None}


def _moment(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
