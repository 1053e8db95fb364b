"""Where a model's module is looked for: like ``python -m``, commands also look in the working directory.

A console script does not do that by itself. The ranks of an agent do not look in its working directory, as
that of a daemon is an accident; they look in the directories of ``--path`` and PYTHONPATH.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

_VARIABLE = "PYTHONPATH"


def add_working_directory() -> None:
    """Have modules found in the working directory, before all others, unless Python was told not to."""
    if not sys.flags.safe_path and "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def environment_of_ranks(directories: Iterable[Path], inherited: Mapping[str, str]) -> dict[str, str]:
    """Variables that have an agent's ranks look in these directories, and not in the working directory."""
    found = [*map(str, directories), *filter(None, inherited.get(_VARIABLE, "").split(os.pathsep))]
    return {_VARIABLE: os.pathsep.join(found), "PYTHONSAFEPATH": "1"}


def searched() -> str:
    """Where a module was looked for, in words: what the user can change, and the installed packages."""
    named = [entry or os.getcwd() for entry in sys.path if not _is_installation(entry)]
    return ", ".join([*dict.fromkeys(named), f"the packages of {sys.prefix}"])


def _is_installation(entry: str) -> bool:
    """Whether a directory belongs to Python itself."""
    own = (sys.prefix, sys.base_prefix, sys.exec_prefix)
    return bool(entry) and any(Path(entry).is_relative_to(prefix) for prefix in own)
