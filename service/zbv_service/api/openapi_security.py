"""Tokens in the OpenAPI document: the scopes of each operation, and its errors."""

from __future__ import annotations

from typing import Any

from zbv_service.api.error_handlers import documented
from zbv_service.errors import (
    BODY_TOO_SLOW,
    INSUFFICIENT_SCOPE,
    OTHER_ORIGIN,
    TOO_MANY_ATTEMPTS,
    UNAUTHENTICATED,
    UNKNOWN_HOST,
)
from zbv_service.security.scheme import SCHEME
from zbv_service.security.scopes import SCOPES


def describe(made: dict[str, Any]) -> None:
    """Complete the document that FastAPI derived from the routes."""
    for methods in made["paths"].values():
        for method, operation in methods.items():
            kinds = [UNKNOWN_HOST]
            if "security" in operation:
                (needed,) = operation["security"]
                operation["security"] = _alternatives(needed[SCHEME])
                kinds += [UNAUTHENTICATED, INSUFFICIENT_SCOPE, TOO_MANY_ATTEMPTS]
                kinds += [] if method == "get" else [OTHER_ORIGIN]
            kinds += [BODY_TOO_SLOW] if "requestBody" in operation else []
            _add(operation["responses"], documented(*kinds))


def _alternatives(scopes: list[str]) -> list[dict[str, list[str]]]:
    """One entry per scope, because one scope suffices; scopes in the same entry would all be required."""
    if set(scopes) == set(SCOPES):
        return [{SCHEME: []}]
    return [{SCHEME: [scope]} for scope in scopes]


def _add(responses: dict[str, Any], more: dict[int | str, dict[str, Any]]) -> None:
    for status, answer in more.items():
        known = responses.setdefault(str(status), answer)
        if answer["description"] not in known["description"]:
            known["description"] += f"; or: {answer['description']}"
