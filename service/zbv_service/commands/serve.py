"""``zbv-service serve``: run the service."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from typing import TYPE_CHECKING, Any

from zbv_service.commands.ending import DONE, FAILED, WRONG_INPUT, Stop
from zbv_service.commands.settings import add_flags, settings_of

if TYPE_CHECKING:
    from zbv_service.settings import Settings


def add_serve(commands: Any) -> None:
    """Add the command."""
    serve = commands.add_parser(
        "serve",
        help="run the service",
        description="Run the service until SIGTERM or Ctrl-C. Searches that run then are finished after the "
        "next start.",
        epilog="Every setting is also an environment variable, such as ZBV_PORT. A flag wins.",
    )
    serve.on_use = add_flags
    serve.set_defaults(run=_serve)


def _serve(parsed: argparse.Namespace) -> int:
    settings = settings_of(parsed)
    # Before the server takes signals over, and when it hands them back after its graceful end.
    signal.signal(signal.SIGTERM, _exit)
    signal.signal(signal.SIGINT, _exit)

    from zbv_service.commands.serving import CannotServe, serve
    from zbv_service.observability import logs

    logs.configure(settings.log_level, settings.log_format)
    has_token = asyncio.run(_prepare(settings))
    if not has_token and not settings.is_local:
        raise Stop(WRONG_INPUT, _needs_token(settings))
    try:
        # What went wrong at the start is in the log.
        return DONE if serve(settings) else FAILED
    except CannotServe as error:
        raise Stop(WRONG_INPUT, str(error)) from None


async def _prepare(settings: Settings) -> bool:
    """Open the database once before the server starts: its own way to fail is a traceback.

    Whether somebody has a token.
    """
    from zbv_service.database import Database, DatabaseUnusable, TokenTable

    database = Database(settings.database)
    try:
        await database.migrate()
        return await TokenTable(database).has_any()
    except DatabaseUnusable as error:
        raise Stop(WRONG_INPUT, str(error)) from None
    finally:
        await database.close()


def _needs_token(settings: Settings) -> str:
    from zbv_service.database.url import shown_url

    database = shown_url(settings.database)
    return (
        f"found host {settings.host}, which others can reach, and no token in {database}. The service does "
        f"not start there before somebody has one:\n"
        f"  zbv-service token create --name admin --scope admin --database {database}\n"
        f"  zbv-service serve --host {settings.host} --port {settings.port} --database {database}\n"
        f"Or let it listen on 127.0.0.1, where commands of your own need no token."
    )


def _exit(_number: int, _frame: object) -> None:
    sys.exit(DONE)
