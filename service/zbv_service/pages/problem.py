"""Errors as pages, and the pages that say what each type of error means."""

from __future__ import annotations

from http import HTTPStatus

from zbv_service.pages.shell import Shell, render

_KNOWN_STATUS = frozenset(map(int, HTTPStatus))


def problem_page(status: int, title: str, detail: str, shell: Shell) -> str:
    """An error as a page, with the same title and detail as the problem document (RFC 9457) of the API."""
    phrase = HTTPStatus(status).phrase if status in _KNOWN_STATUS else ""
    return render("problem.html.j2", shell, status=status, title=title, detail=detail, phrase=phrase)


def problem_type_page(name: str, status: int, title: str, shell: Shell, *, meaning: str, remedy: str) -> str:
    """What a type of error means, and what to do: the page at the address that is its ``type``."""
    return render(
        "problem_type.html.j2", shell, name=name, status=status, title=title, meaning=meaning, remedy=remedy
    )
