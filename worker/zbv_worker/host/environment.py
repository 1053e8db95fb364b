"""The environment of ranks, above all where to look for a model's module.

Like ``python -m``, commands include the working directory; console scripts do not do that by default. An
agent's ranks do not use its working directory, which is arbitrary for a daemon, but the directories of
``--path`` and PYTHONPATH.

Which paths an agent allows is compared after symbolic links are resolved.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from glob import escape, has_magic
from itertools import takewhile
from pathlib import Path

_VARIABLE = "PYTHONPATH"


def add_working_directory() -> None:
    """Search the working directory for modules first, unless Python runs in safe-path mode."""
    if not sys.flags.safe_path and "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def environment_of_ranks(directories: Iterable[Path], inherited: Mapping[str, str]) -> dict[str, str]:
    """Variables that make an agent's ranks search these directories, but not the working directory."""
    found = [*map(str, directories), *filter(None, inherited.get(_VARIABLE, "").split(os.pathsep))]
    return {_VARIABLE: os.pathsep.join(found), "PYTHONSAFEPATH": "1"}


def searched() -> str:
    """The searched directories in words: those that the user can change, and the installed packages."""
    named = [entry or os.getcwd() for entry in sys.path if not _is_installation(entry)]
    return ", ".join([*dict.fromkeys(named), f"the packages of {sys.prefix}"])


def _is_installation(entry: str) -> bool:
    """Whether a directory is part of the Python installation."""
    own = (sys.prefix, sys.base_prefix, sys.exec_prefix)
    return bool(entry) and any(Path(entry).is_relative_to(prefix) for prefix in own)


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


SERVER, PLAN, FOLDER = "ZBV_SERVER", "ZBV_PLAN", "ZBV_RUN_FOLDER"
"""The variables through which a script finds the run in which an agent started it."""


def script_environment(server: str, plan_id: str, folder: Path) -> dict[str, str]:
    """The variables of a script; ``folder`` is that of the run's generation on this node."""
    return {SERVER: server, PLAN: plan_id, FOLDER: str(folder)}
