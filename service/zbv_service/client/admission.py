"""Which runs an agent accepts: one rule for the service, which chooses agents, and for the agents."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

TRANSFORMERS = "transformers"
"""The part before the colon of a model that is a folder or a configuration on the node."""


def is_script_allowed(path: str, patterns: Sequence[str]) -> bool:
    """Whether the absolute path of a script matches one of an agent's patterns.

    ``*`` matches any characters, slashes included. A pattern that is the path itself matches, whatever
    characters it has. Only the text is compared, so the agent must resolve links as well. A path with ``..``
    is never allowed.
    """
    wanted = PurePosixPath(path)
    return (
        wanted.is_absolute()
        and ".." not in wanted.parts
        and any(path == pattern or fnmatchcase(path, pattern) for pattern in patterns)
    )


def is_directory_allowed(directory: str | None, allowed: Sequence[str] | None) -> bool:
    """Whether an absolute path is one of an agent's directories or lies below one.

    When ``allowed`` is None, every path is allowed. Only the text is compared, so the caller must resolve
    links first. A path with ``..`` is never allowed.
    """
    if directory is None or allowed is None:
        return True
    wanted = PurePosixPath(directory)
    return ".." not in wanted.parts and any(wanted.is_relative_to(each) for each in allowed)


def is_model_allowed(factory: str, patterns: Sequence[str]) -> bool:
    """Whether ``package.module:factory`` matches one of an agent's patterns.

    ``*`` matches any characters, dots included. A pattern with a colon is compared with the whole name, and
    one without a colon with the module alone. ``package.*`` also matches ``package`` itself.
    ``transformers:PATH`` names files on the node, so only patterns that begin with ``transformers:`` match,
    and a path with ``..`` is never allowed. The agent must resolve links in the path as well.
    """
    module, _, name = factory.partition(":")
    if module == TRANSFORMERS:
        patterns = [pattern for pattern in patterns if pattern.startswith(f"{TRANSFORMERS}:")]
        if ".." in PurePosixPath(name).parts:
            return False
    return any(
        factory == pattern
        or fnmatchcase(factory if ":" in pattern else module, pattern)
        or (pattern.endswith(".*") and fnmatchcase(module, pattern[:-2]))
        for pattern in patterns
    )


def how_to_allow(factory: str) -> str:
    """The remedy for a model that an agent does not allow."""
    if factory.startswith(f"{TRANSFORMERS}:"):
        return f"Start it with --allow-model '{factory}' if runs may read these files on this node."
    return f"Start it with --allow-model '{factory.partition(':')[0]}' if its code may run on this node."
