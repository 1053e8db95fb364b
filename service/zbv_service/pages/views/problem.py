"""Errors as pages."""

from __future__ import annotations

from collections.abc import Mapping
from http.client import responses
from typing import Any

_PASSING = frozenset({429, 500, 503})
"""Statuses of errors that may be temporary."""
_WRONG_PARAMETERS = 422


def problem_values(document: Mapping[str, Any], again: str | None) -> dict[str, Any]:
    """The template's values for a problem document (RFC 9457).

    Parameters
    ----------
    again
        The address for another attempt, without the prefix of a proxy; None if the request was not a GET.
    """
    status, title = int(document["status"]), str(document["title"])
    phrase = responses.get(status, "")
    kind = str(document.get("type", "about:blank"))
    detail, errors = str(document["detail"]), document.get("errors") or ()
    is_repeated = bool(errors) and all(error["detail"] in detail for error in errors)
    return {
        "problem": document,
        "phrase": "" if phrase == title else phrase,
        "detail": "" if is_repeated else detail[:1].upper() + detail[1:],
        "errors": errors,
        "about": kind if kind.startswith("/") else None,
        "again": again if status in _PASSING else None,
        "bare": again is not None and "?" in again and status == _WRONG_PARAMETERS,
    }
