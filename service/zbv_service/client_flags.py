"""The flags with which commands say who asks a service. They are variables, too, which ranks inherit."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from zbv_service.client_tls import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE
from zbv_service.client_token import FILE_VARIABLE, TOKEN_VARIABLE

_FLAGS = (
    ("--token-file", "token_file", FILE_VARIABLE, "file that holds a token of the service"),
    (
        "--tls-ca",
        "client_tls_ca",
        CA_VARIABLE,
        "authorities that the service's certificate is checked against",
    ),
    ("--tls-cert", "client_tls_cert", CERT_VARIABLE, "certificate to show to the service"),
    ("--tls-key", "client_tls_key", KEY_VARIABLE, "its private key"),
)


def add_credentials(command: argparse.ArgumentParser) -> None:
    """Add the flags. There is none for a token itself: everybody on a machine sees its command lines."""
    group = command.add_argument_group("who asks")
    for flag, name, variable, text in _FLAGS:
        default = f"default: ${variable}"
        if variable == FILE_VARIABLE:
            default += (
                f" or ${TOKEN_VARIABLE}, the token itself; on the machine of a local service none is needed"
            )
        group.add_argument(flag, dest=name, metavar="FILE", help=f"{text} ({default})")


def use(parsed: argparse.Namespace) -> None:
    """Let the flags that were given count as variables, for this process and those that it starts."""
    for _, name, variable, _ in _FLAGS:
        value = getattr(parsed, name, None)
        if value is not None:
            os.environ[variable] = str(Path(value).absolute())
            if variable == FILE_VARIABLE:
                os.environ.pop(TOKEN_VARIABLE, None)
