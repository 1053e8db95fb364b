"""Small JSON files by which the agent, its launcher and its ranks tell each other how things stand."""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

SPEC = "spec.json"
"""What to run, for the launcher and the ranks."""
OUTCOME = "outcome.json"
"""How the ranks ended, from the launcher."""
PULSE = "agent-pulse"
"""When the agent was last at work, in seconds of the host's monotonic clock: renewed by its thread."""
NEXT_PLAN = "next-plan.json"
"""A plan to change to, for rank 0."""

_DAY = 86_400.0
_RUN_NAME = re.compile(r"[0-9a-f]{32}")


def progress_file(folder: Path, rank: int) -> Path:
    """Where a rank says where it is."""
    return folder / f"progress-{rank}.json"


def failure_file(folder: Path, rank: int) -> Path:
    """Where a rank says why it ended."""
    return folder / f"failure-{rank}.json"


def trace_file(folder: Path, rank: int) -> Path:
    """Where a rank writes when the actions of its newest steps happened."""
    return folder / f"trace-{rank}.json"


def events_file(folder: Path, rank: int) -> Path:
    """Where a rank writes what happened that people should know: ``{"rank", "events"}``, the newest 100."""
    return folder / f"events-{rank}.json"


def log_files(folder: Path, local_rank: int) -> list[Path]:
    """What a node's rank printed, as torch elastic keeps it, standard error last; empty before its start."""
    found = (folder / "logs").glob(f"*/attempt_*/{local_rank}/std*.log")
    return sorted(found, key=lambda path: path.name == "stderr.log")


def remove_old(state: Path, days: float, now: float) -> list[Path]:
    """Remove the folders of generations in which nothing has changed for so many days; returns them.

    Only what an agent made: a run's id, a number, and a specification in it. Ranks that are there write where
    they are all the time, so a generation that is under way is never old.
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
    """Replace a file as a whole: readers see the old one or the new one."""
    part = f"{path}.part"
    Path(part).write_text(json.dumps(document), encoding="utf-8")
    os.replace(part, path)


def read_json(path: Path) -> Any:
    """A file's content, None when there is no such file or it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
