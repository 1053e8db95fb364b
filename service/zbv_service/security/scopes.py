"""Scopes: what a token may do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

Scope = Literal["read", "search", "agent", "launch", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
"""What a token may do.

``read``: see searches, plans, runs, agents, traces, logs and metrics. ``search``: start, cancel and discard
searches, and import plans. ``agent``: act as an agent: register a node, take its work, send measurements of
its ranks; fetch plans. ``launch``: start, change and cancel runs, which execute code on agents; import plans.
``admin``: everything.
"""


def allows(granted: Iterable[str], needed: Iterable[str]) -> bool:
    """Whether these scopes include one of the needed ones."""
    held = frozenset(granted)
    return "admin" in held or not held.isdisjoint(needed)
