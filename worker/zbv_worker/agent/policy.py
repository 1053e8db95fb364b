"""What a node allows runs to do: which models they load, and where they keep checkpoints.

A run writes, reads and removes checkpoints as the agent's user, in a directory that its owner chooses. So the
node restricts the choice.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zbv_service.client import NodeWork
from zbv_service.client.admission import is_model_allowed


def allowed(models: Sequence[str], checkpoint_directories: Sequence[Path]) -> dict[str, Any]:
    """What an agent allows, in the format of its registration.

    The service compares strings, so it gets each directory as given, and with symbolic links resolved.
    """
    directories = {str(path) for given in checkpoint_directories for path in (given, given.resolve())}
    return {"models": list(models), "checkpoint_directories": sorted(directories)}


def refusal_of(
    work: NodeWork, agent: str, models: Sequence[str], checkpoint_directories: Sequence[Path]
) -> str | None:
    """Why an agent refuses its part of a run; None if it accepts.

    Directories are compared with symbolic links and ``..`` resolved.
    """
    if not is_model_allowed(work.factory, models):
        module = work.factory.partition(":")[0]
        return (
            f"agent {agent} does not load model {work.factory}: it allows {', '.join(models) or 'none'}. "
            f"Start it with --allow-model '{module}' if its code may run on this node."
        )
    checkpoint = (work.document.get("options") or {}).get("checkpoint")
    if checkpoint is None:
        return None
    return _refusal_of_directory(str(checkpoint["directory"]), agent, checkpoint_directories)


def _refusal_of_directory(given: str, agent: str, allowed_directories: Sequence[Path]) -> str | None:
    if not os.path.isabs(given):
        return (
            f"agent {agent} does not keep checkpoints in {given!r}: the directory must be an absolute path "
            f"that all nodes share, such as /shared/{Path(given).name}."
        )
    resolved = Path(given).resolve()
    if any(resolved.is_relative_to(directory.resolve()) for directory in allowed_directories):
        return None
    target = "" if str(resolved) == given else f", which is {resolved}"
    found = ", ".join(map(str, allowed_directories)) or "none"
    return (
        f"agent {agent} does not keep checkpoints in {given}{target}: it allows {found}. Start it with "
        f"--allow-checkpoint-dir '{resolved}' if runs may write, read and remove files there."
    )
