"""An agent's options, and what they allow runs to do: load models, run scripts, and keep checkpoints.

A run writes, reads and removes checkpoints as the agent's user, in a directory that its owner chooses. So the
node restricts the choice.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zbv_service.client import NodeWork
from zbv_service.client.admission import TRANSFORMERS, how_to_allow, is_script_allowed

from zbv_worker.host.environment import is_model_admitted, is_path_allowed


@dataclass(frozen=True)
class AgentOptions:
    """Options of an agent."""

    server: str
    name: str
    address: str
    slots: int
    state_dir: Path
    """Keeps a folder per run and generation, with logs, progress and results."""
    allowed_models: tuple[str, ...] = ()
    """Patterns; see :func:`zbv_service.client.admission.is_model_allowed`. Without any, every model is
    refused."""
    checkpoint_directories: tuple[Path, ...] = ()
    """Absolute paths; runs may keep checkpoints in and below these. Without any, runs with checkpoints are
    refused."""
    allowed_scripts: tuple[str, ...] = field(default=(), kw_only=True)
    """Patterns of absolute paths; see :func:`zbv_service.client.admission.is_script_allowed`. Without any,
    every script is refused."""
    path: tuple[Path, ...] = ()
    """Directories in which ranks look for the model's module."""
    devices: tuple[str, ...] = ()
    port: int | None = None
    """The port of the ranks' rendezvous if this is a run's first node; None for any free port."""
    drain_seconds: float = 60.0
    """How long a run may continue after SIGTERM."""
    keep_days: float = 7.0
    """How long to keep the folder of an ended generation."""

    @property
    def allows(self) -> dict[str, Any]:
        """What the agent allows, in the format of its registration.

        The service compares strings, so it gets each directory as given, and with symbolic links resolved.
        """
        directories = {
            str(path) for given in self.checkpoint_directories for path in (given, given.resolve())
        }
        return {
            "models": list(self.allowed_models),
            "scripts": list(self.allowed_scripts),
            "checkpoint_directories": sorted(directories),
        }

    def refusal_of(self, work: NodeWork) -> str | None:
        """Why the agent refuses its part of a run; None if it accepts.

        Directories and scripts are compared with symbolic links and ``..`` resolved.
        """
        if work.script is not None:
            return _refusal_of_script(work.script, self.name, self.allowed_scripts)
        refusal = _refusal_of_model(work, self.name, self.allowed_models)
        if refusal is not None:
            return refusal
        checkpoint = (work.document.get("options") or {}).get("checkpoint")
        if checkpoint is None:
            return None
        return _refusal_of_directory(str(checkpoint["directory"]), self.name, self.checkpoint_directories)


def _refusal_of_model(work: NodeWork, agent: str, patterns: Sequence[str]) -> str | None:
    if work.factory is None:
        return f"agent {agent} found neither a model nor a script in the run; update the agent."
    data = (work.document.get("model") or {}).get("arguments", {}).get("data")
    is_of_files = work.factory.startswith(f"{TRANSFORMERS}:")
    for named in [work.factory, *([f"{TRANSFORMERS}:{data}"] if is_of_files and data is not None else [])]:
        if not is_model_admitted(named, patterns):
            return (
                f"agent {agent} does not load model {named}: it allows {', '.join(patterns) or 'none'}. "
                f"{how_to_allow(named)}"
            )
    return None


def _refusal_of_script(given: str, agent: str, patterns: Sequence[str]) -> str | None:
    resolved = str(Path(given).resolve())
    if not (is_script_allowed(given, patterns) and is_path_allowed(given, patterns)):
        target = "" if resolved == given else f", which is {resolved}"
        return (
            f"agent {agent} does not run script {given}{target}: it allows "
            f"{', '.join(patterns) or 'none'}. Start it with --allow-script '{resolved}' if its code may "
            f"run on this node."
        )
    if not Path(given).is_file():
        return f"agent {agent} has no file {given}. Put the script at this path on every node."
    return None


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
