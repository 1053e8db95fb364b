"""Errors as pages, for those who would rather have a page: the same documents, in the frame of all pages."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable
from typing import Any, cast

from fastapi import FastAPI, Request, Response

from zbv_service.api.negotiation import wants_page
from zbv_service.errors import MEDIA_TYPE
from zbv_service.pages.answers import document_page

Handler = Callable[[Request, Exception], Response | Awaitable[Response]]


def install(app: FastAPI) -> None:
    """Show browsers the errors of an application as pages; after all of its handlers are there."""
    for key, handler in list(app.exception_handlers.items()):
        app.add_exception_handler(key, as_page(cast("Handler", handler)))


def as_page(handler: Handler) -> Callable[[Request, Exception], Awaitable[Response]]:
    """The handler of an error, except that browsers get the problem document as a page."""

    async def handle(request: Request, error: Exception) -> Response:
        answer = handler(request, error)
        if inspect.isawaitable(answer):
            answer = await answer
        if answer.media_type != MEDIA_TYPE or not wants_page(request):
            return answer
        document: dict[str, Any] = json.loads(bytes(answer.body))
        kept = ("retry-after", "www-authenticate", "allow")
        headers = {name: value for name in kept if (value := answer.headers.get(name)) is not None}
        return document_page(document, request, headers)

    return handle
