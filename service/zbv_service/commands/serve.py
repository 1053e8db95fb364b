"""``zbv-service serve``: run the service."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from typing import TYPE_CHECKING, Any

from zbv_service.commands.arguments import DONE, FAILED, WrongInput
from zbv_service.commands.settings import add_flags, settings_of

if TYPE_CHECKING:
    from zbv_service.settings import Settings


_EPILOG = """\
examples:
  zbv-service serve
  zbv-service serve --host 0.0.0.0 --tls-cert cert.pem --tls-key key.pem \\
      --database postgresql://zbv@db/zbv --searches 4

Every setting is also an environment variable, such as ZBV_PORT for --port. Flags take precedence."""


def add_serve(commands: Any) -> None:
    """Add the command."""
    serve = commands.add_parser(
        "serve",
        help="run the service",
        description="Run the service until SIGTERM or Ctrl-C. Searches that are interrupted then continue "
        "after the next start.",
        epilog=_EPILOG,
    )
    serve.on_use = add_flags
    serve.set_defaults(run=_serve)


def _serve(parsed: argparse.Namespace) -> int:
    settings = settings_of(parsed)
    # These handlers apply before the server installs its own, and again after it has shut down.
    signal.signal(signal.SIGTERM, _exit)
    signal.signal(signal.SIGINT, _exit)

    from zbv_service.commands.serving import CannotServe, serve
    from zbv_service.observability import logs

    logs.configure(settings.log_level, settings.log_format)

    def prepare() -> None:
        has_token = asyncio.run(_prepare(settings))
        if not has_token and not settings.is_local:
            raise WrongInput(_needs_token(settings))

    try:
        # The log explains a failed start.
        return DONE if serve(settings, prepare) else FAILED
    except CannotServe as error:
        raise WrongInput(str(error)) from None


async def _prepare(settings: Settings) -> bool:
    """Migrate the database and return whether it contains a token.

    This happens before the server starts, because the server would report an unusable database with a
    traceback.
    """
    from zbv_service.database import Database, DatabaseAway, DatabaseUnusable
    from zbv_service.security.tokens import TokenTable

    database = Database(settings.database)
    try:
        await database.migrate()
        return await TokenTable(database).has_any()
    except (DatabaseAway, DatabaseUnusable) as error:
        raise WrongInput(str(error)) from None
    finally:
        await database.close()


def _needs_token(settings: Settings) -> str:
    from zbv_service.settings import shown_url

    database = shown_url(settings.database)
    return (
        f"--host: found {settings.host}, which other machines can reach, but there is no token in "
        f"{database}. Create one before you start the service there:\n"
        f"  zbv-service token create --name admin --scope admin --database {database}\n"
        f"  zbv-service serve --host {settings.host} --port {settings.port} --database {database} \\\n"
        f"      --tls-cert cert.pem --tls-key key.pem\n"
        f"Or use --host 127.0.0.1, where your own commands need no token."
    )


def _exit(_number: int, _frame: object) -> None:
    sys.exit(DONE)
