"""Signing in with a browser: ``/sign-in``, ``/sign-out``, and sign-in links."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qs, quote

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from zbv_service.api.bodies import read_form
from zbv_service.api.error_handlers import documented
from zbv_service.api.negotiation import root_of, wants_page
from zbv_service.api.state import state_of
from zbv_service.errors import (
    INSUFFICIENT_SCOPE,
    OTHER_ORIGIN,
    TOO_MUCH_STORED,
    UNAUTHENTICATED,
    ApiError,
    response_to,
)
from zbv_service.pages.shell import NO_STORE, html, render, shell_of
from zbv_service.security.access import (
    ANY_TOKEN,
    ANYBODY,
    Unauthenticated,
    is_from_elsewhere,
    require_same_origin,
    session_of,
    set_session,
)
from zbv_service.security.sign_in import LINK_SECONDS, LinkUnusable, SignInLink
from zbv_service.security.tokens import grant_of

MAX_FORM_BYTES = 8192

router = APIRouter()


def install(app: FastAPI) -> None:
    """Show browsers the sign-in page when a token or session is missing or wrong."""
    app.add_exception_handler(Unauthenticated, _on_refusal)


@router.get("/sign-in", dependencies=[ANYBODY], include_in_schema=False)
async def get_sign_in(request: Request, token: str = "", next: str = "/") -> Response:
    """The page with a field for a token, or for a sign-in link with a button.

    A link does nothing by itself: programs that show previews of links would use it up, and other sites could
    sign a browser in under another name.
    """
    if state_of(request).access.is_open:
        return _see_other(request, "/")
    return _sign_in_page(request, next, 200, link=token)


@router.post("/sign-in", dependencies=[ANYBODY], include_in_schema=False)
async def post_sign_in(request: Request) -> Response:
    """Begin a session with a token or a link; the session before it ends."""
    try:
        require_same_origin(request)
        form = parse_qs(await read_form(request, MAX_FORM_BYTES))
        destination = form.get("next", ["/"])[0]
        found = state_of(request)
        if found.access.is_open:
            return _see_other(request, destination)
        link = form.get("link", [""])[0].strip()
        if link:
            session = await found.sign_in.follow_link(link)
        else:
            grant = await found.access.check(form.get("token", [""])[0].strip())
            session = await found.sign_in.begin(grant)
    except LinkUnusable as error:
        command = f"zbv-service token link --server {shell_of(request).base_url}"
        return _sign_in_page(request, destination, 401, f"{error} To get a new one: {command}")
    except ApiError as error:
        if error.kind not in (UNAUTHENTICATED, INSUFFICIENT_SCOPE, OTHER_ORIGIN):
            raise
        return _refused_page(request, error)
    before = session_of(request)
    if before is not None:
        await found.sign_in.end(before)
    return _begin(request, session, destination)


@router.post("/sign-out", dependencies=[ANYBODY], include_in_schema=False)
async def post_sign_out(request: Request) -> Response:
    """End the browser's session."""
    require_same_origin(request)
    text = session_of(request)
    if text is not None:
        await state_of(request).sign_in.end(text)
    answer = _see_other(request, "/sign-in")
    set_session(answer, request, "", max_age=0)
    return answer


@router.post(
    "/v1/sign-in-links",
    operation_id="create_sign_in_link",
    tags=["access"],
    dependencies=[ANY_TOKEN],
    summary="Get a link that signs a browser in, once",
    status_code=201,
    response_description="The first browser that opens the link gets the scopes of the token.",
    responses=documented(TOO_MUCH_STORED),
)
async def create_sign_in_link(request: Request) -> SignInLink:
    """A link that gives a browser the scopes and the expiry of the caller's token."""
    found, base = state_of(request), str(request.base_url)
    grant = grant_of(request)
    expires_at = datetime.now(UTC) + timedelta(seconds=LINK_SECONDS)
    if found.access.is_open:
        return SignInLink(url=base, expires_at=expires_at)
    token = await found.sign_in.new_link(grant)
    return SignInLink(url=f"{base}sign-in?token={token}", expires_at=expires_at)


@router.get("/openapi.json", dependencies=[ANY_TOKEN], include_in_schema=False)
async def get_openapi(request: Request) -> Response:
    """The OpenAPI document; generated once, outside the event loop, because it takes long."""
    app = request.app
    if getattr(app.state, "openapi_text", None) is None:
        write = state_of(request).computations.write
        app.state.openapi_text = await write(lambda: json.dumps(app.openapi()).encode())
    return Response(app.state.openapi_text, media_type="application/json")


async def _on_refusal(request: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    if request.method != "GET" or not wants_page(request):
        return response_to(error)
    query = f"?{request.url.query}" if request.url.query else ""
    path = request.url.path.removeprefix(root_of(request))
    # A sign-in page also replaces the pages of a session that has ended, because its cookie is still sent.
    answer = _sign_in_page(request, path + query, error.kind.status)
    answer.headers.update(error.headers)
    return answer


def _sign_in_page(
    request: Request, destination: str, status: int, complaint: str = "", link: str = ""
) -> HTMLResponse:
    content = render(
        "sign_in.html.j2",
        shell_of(request),
        destination=_inside(destination),
        complaint=complaint,
        link=link,
        # A request from another site has no cookie; when the page reloads itself, the browser sends it.
        asks_again=not link and request.method == "GET" and is_from_elsewhere(request),
    )
    return html(content, status)


def _refused_page(request: Request, error: ApiError) -> HTMLResponse:
    answer = _sign_in_page(request, "/", error.kind.status, error.detail)
    answer.headers.update(error.headers)
    return answer


def _begin(request: Request, session: str, destination: str) -> Response:
    answer = _see_other(request, destination)
    set_session(answer, request, session, round(state_of(request).sign_in.session_seconds))
    return answer


def _see_other(request: Request, destination: str) -> RedirectResponse:
    return RedirectResponse(root_of(request) + quote(_inside(destination), safe="/?&=%"), 303, NO_STORE)


def _inside(destination: str) -> str:
    """A path of this service, so that nobody is redirected to another site after signing in."""
    is_path = destination.startswith("/") and not destination.startswith(("//", "/\\"))
    return destination if is_path and destination.isprintable() else "/"
