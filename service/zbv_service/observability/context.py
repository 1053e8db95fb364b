"""The request, the caller and the search for which the current code runs; log lines contain the ids.

Tasks and threads inherit context variables from the task that starts them, so functions need not pass them.
"""

from __future__ import annotations

from contextvars import ContextVar

REQUEST_ID: ContextVar[str | None] = ContextVar("zbv_request_id", default=None)
CALLER: ContextVar[str | None] = ContextVar("zbv_caller", default=None)
"""The name of the request's token, or the client's address if the service needs no token."""
SEARCH_ID: ContextVar[str | None] = ContextVar("zbv_search_id", default=None)
ROOT_PATH: ContextVar[str] = ContextVar("zbv_root_path", default="")
"""The prefix under which a proxy serves the application, without a trailing slash."""
