"""Whether a process still runs."""

from __future__ import annotations

from pathlib import Path


def is_alive(process_id: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
