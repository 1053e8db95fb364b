"""The flags of every command that talks to a service: its address, the token, and TLS."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from zbv_service.client.tls import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE
from zbv_service.client.tokens import FILE_VARIABLE, TOKEN_VARIABLE

SERVER_VARIABLE = "ZBV_SERVER"
DEFAULT_SERVER = "http://127.0.0.1:8000"
_CREDENTIALS = (
    ("--token-file", "token_file", FILE_VARIABLE, "file that contains a token of the service"),
    ("--tls-ca", "client_tls_ca", CA_VARIABLE, "authorities that may sign the service's certificate (PEM)"),
    ("--tls-cert", "client_tls_cert", CERT_VARIABLE, "client certificate (PEM)"),
    ("--tls-key", "client_tls_key", KEY_VARIABLE, "private key of the client certificate (PEM)"),
)


def add_server(command: argparse.ArgumentParser, default: str | None = DEFAULT_SERVER) -> None:
    """Add ``--server`` and the flags for credentials."""
    otherwise = f", or {default}" if default else ""
    command.add_argument(
        "--server",
        metavar="URL",
        default=os.environ.get(SERVER_VARIABLE, default),
        help=f"address of the service (default: ${SERVER_VARIABLE}{otherwise})",
    )
    add_credentials(command)


def add_credentials(command: argparse.ArgumentParser) -> None:
    """Add the flags for the token and TLS. The token itself has none: other users can see command lines."""
    group = command.add_argument_group("credentials")
    for flag, name, variable, text in _CREDENTIALS:
        default = f"default: ${variable}"
        if variable == FILE_VARIABLE:
            default += (
                f", or the token itself in ${TOKEN_VARIABLE}; your own service on this machine needs neither"
            )
        group.add_argument(flag, dest=name, metavar="FILE", help=f"{text} ({default})")


def apply_credentials(parsed: argparse.Namespace) -> None:
    """Copy the given flags to their environment variables, so that child processes inherit them."""
    for _, name, variable, _ in _CREDENTIALS:
        value = getattr(parsed, name, None)
        if value is not None:
            os.environ[variable] = str(Path(value).absolute())
            if variable == FILE_VARIABLE:
                os.environ.pop(TOKEN_VARIABLE, None)
