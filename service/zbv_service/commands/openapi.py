"""``zbv-service openapi``: print the API's OpenAPI document."""

from __future__ import annotations

import argparse
import json
from typing import Any

from zbv_service.commands.ending import DONE


def add_openapi(commands: Any) -> None:
    """Add the command."""
    openapi = commands.add_parser(
        "openapi",
        help="print the API's OpenAPI document",
        description="Print the API's OpenAPI document (JSON).",
        epilog="example: zbv-service openapi > openapi.json",
    )
    openapi.set_defaults(run=_openapi)


def _openapi(_parsed: argparse.Namespace) -> int:
    from zbv_service.app import create_app

    print(json.dumps(create_app().openapi(), indent=2, ensure_ascii=False))
    return DONE
