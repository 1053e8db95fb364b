"""The flags of every command that speaks to a service."""

from __future__ import annotations

import argparse
import os

from zbv_service.client_flags import add_credentials

DEFAULT_SERVER = "http://127.0.0.1:8000"


def add_server(command: argparse.ArgumentParser) -> None:
    """Add the flags that say where the service is, and who asks it."""
    command.add_argument(
        "--server",
        metavar="URL",
        default=os.environ.get("ZBV_SERVER", DEFAULT_SERVER),
        help=f"address of the service (default: $ZBV_SERVER, or {DEFAULT_SERVER})",
    )
    add_credentials(command)
