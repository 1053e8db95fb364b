"""The command ``zbv-service``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from zbv_solver.commands.parser import Parser

from zbv_service.client.flags import apply_credentials
from zbv_service.client.tokens import CredentialsUnusable
from zbv_service.commands.activity import add_activity
from zbv_service.commands.arguments import EPILOG, FAILED, INTERRUPTED, WRONG_INPUT, Stop
from zbv_service.commands.layout import add_layout
from zbv_service.commands.run import add_run
from zbv_service.commands.serve import add_serve
from zbv_service.commands.settings import Command, add_openapi, add_settings
from zbv_service.commands.submit import add_submit
from zbv_service.commands.token import add_token


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    try:
        parsed = _parser().parse_args(arguments)
        apply_credentials(parsed)
        status: int = parsed.run(parsed)
    except Stop as stop:
        print(f"zbv-service: {stop}", file=sys.stderr)
        return stop.status
    except CredentialsUnusable as error:
        print(f"zbv-service: {error}", file=sys.stderr)
        return WRONG_INPUT
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("zbv_"):
            raise
        print(
            f"zbv-service: found no module {error.name!r}; this command needs the service. "
            f"Install it: pip install 'zbv[service]' (from a checkout: pip install '.[service]').",
            file=sys.stderr,
        )
        return WRONG_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the output is gone. Without this, Python would report the error again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return status


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="zbv-service",
        description="Plan zero-bubble V schedules as a service, and run them on agents.",
        epilog=EPILOG,
    )
    parser.add_common_flags()
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Command)
    for add in (
        add_serve,
        add_submit,
        add_layout,
        add_run,
        add_activity,
        add_token,
        add_settings,
        add_openapi,
    ):
        add(commands)
    return parser
