"""Errors as pages, and a page that explains each type of error."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from zbv_service.pages.shell import Shell, render

_KNOWN_STATUS = frozenset(map(int, HTTPStatus))
_PASSING = frozenset({429, 500, 503})
"""Statuses of errors that may be temporary."""
_WRONG_PARAMETERS = 422


def problem_page(document: Mapping[str, Any], shell: Shell, again: str | None = None) -> str:
    """An error as a page: a problem document (RFC 9457) for people.

    Parameters
    ----------
    again
        The address to ask once more, without the prefix of a proxy; None where asking once more is no GET.
    """
    status, title = int(document["status"]), str(document["title"])
    phrase = HTTPStatus(status).phrase if status in _KNOWN_STATUS else ""
    kind = str(document.get("type", "about:blank"))
    detail, errors = str(document["detail"]), document.get("errors") or ()
    is_told = bool(errors) and all(error["detail"] in detail for error in errors)
    return render(
        "problem.html.j2",
        shell,
        problem=document,
        phrase="" if phrase == title else phrase,
        detail="" if is_told else detail[:1].upper() + detail[1:],
        errors=errors,
        about=kind if kind.startswith("/") else None,
        again=again if status in _PASSING else None,
        bare=again is not None and "?" in again and status == _WRONG_PARAMETERS,
    )


def problem_type_page(name: str, status: int, title: str, shell: Shell, *, meaning: str, remedy: str) -> str:
    """The meaning of a type of error and its remedy: the page at the address of its ``type``."""
    return render(
        "problem_type.html.j2", shell, name=name, status=status, title=title, meaning=meaning, remedy=remedy
    )
