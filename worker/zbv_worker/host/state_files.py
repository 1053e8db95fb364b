"""Small JSON files through which the agent, its launcher and its ranks exchange state."""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

SPEC = "spec.json"
"""The work, for the launcher and the ranks."""
OUTCOME = "outcome.json"
"""How the ranks ended, written by the launcher."""
PULSE = "agent-pulse"
"""When the agent last ran, in seconds of the host's monotonic clock; renewed by a thread of the agent."""
NEXT_PLAN = "next-plan.json"
"""A plan to change to, for rank 0."""

_DAY = 86_400.0
_RUN_NAME = re.compile(r"[0-9a-f]{32}")


def progress_file(folder: Path, rank: int) -> Path:
    """A rank's progress."""
    return folder / f"progress-{rank}.json"


def failure_file(folder: Path, rank: int) -> Path:
    """Why a rank failed."""
    return folder / f"failure-{rank}.json"


def trace_file(folder: Path, rank: int) -> Path:
    """When the actions of a rank's newest steps happened."""
    return folder / f"trace-{rank}.json"


def events_file(folder: Path, rank: int) -> Path:
    """A rank's newest 100 events: ``{"rank", "events"}``."""
    return folder / f"events-{rank}.json"


def log_files(folder: Path, local_rank: int) -> list[Path]:
    """The output of one of a node's ranks, as torch elastic keeps it, stderr last; empty before it starts."""
    found = (folder / "logs").glob(f"*/attempt_*/{local_rank}/std*.log")
    return sorted(found, key=lambda path: path.name == "stderr.log")


def remove_old(state: Path, days: float, now: float) -> list[Path]:
    """Remove the folders of generations that have not changed for ``days``; returns them.

    Removes only an agent's folders: named by a run's id and a number, with a specification inside. Running
    ranks write their progress continuously, so a running generation is never old.
    """
    removed = []
    for spec in sorted(state.glob(f"*/*/{SPEC}")):
        folder, run = spec.parent, spec.parent.parent
        if not (_RUN_NAME.fullmatch(run.name) and folder.name.isdigit()):
            continue
        if now - _newest_change(folder) > days * _DAY:
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
            with suppress(OSError):
                run.rmdir()  # once its last generation is gone
    return removed


def _newest_change(folder: Path) -> float:
    newest = 0.0
    for path in (folder, *folder.rglob("*")):
        with suppress(FileNotFoundError):
            newest = max(newest, path.lstat().st_mtime)
    return newest


def write_json(path: Path | str, document: Any) -> None:
    """Replace a file atomically: readers see either the old or the new content."""
    part = f"{path}.part"
    Path(part).write_text(json.dumps(document), encoding="utf-8")
    os.replace(part, path)


def read_json(path: Path) -> Any:
    """A file's content; None if it does not exist or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
