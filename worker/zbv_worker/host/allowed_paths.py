"""Compares paths with an agent's patterns after symbolic links are resolved."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from glob import escape, has_magic
from itertools import takewhile
from pathlib import Path


def is_path_allowed(given: str, patterns: Sequence[str]) -> bool:
    """Whether the target of a path matches a pattern; a pattern that is the path itself always matches."""
    resolved = str(Path(given).resolve())
    return any(given == pattern or fnmatchcase(resolved, _resolved(pattern)) for pattern in patterns)


def is_model_admitted(factory: str, patterns: Sequence[str]) -> bool:
    """Whether patterns allow a model; for ``transformers:PATH``, also the target of the path."""
    from zbv_service.client.admission import TRANSFORMERS, is_model_allowed

    prefix = f"{TRANSFORMERS}:"
    if not is_model_allowed(factory, patterns):
        return False
    paths = [pattern.removeprefix(prefix) for pattern in patterns if pattern.startswith(prefix)]
    return not factory.startswith(prefix) or is_path_allowed(factory.removeprefix(prefix), paths)


def _resolved(pattern: str) -> str:
    """A pattern with symbolic links resolved in the directories before its first wildcard."""
    parts = Path(pattern).parts
    plain = list(takewhile(lambda part: not has_magic(part), parts))
    if not plain:  # such as *, which matches any absolute path
        return pattern
    return "/".join([escape(str(Path(*plain).resolve())).rstrip("/"), *parts[len(plain) :]])
