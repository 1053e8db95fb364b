"""Processes: whether they still run, and files that they write for their test."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from zbv_worker.host.local_ranks import Process

DEADLINE = 240.0
"""Generous: no test is about speed, and a busy machine may be many times slower than a free one."""


def is_alive(process_id: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(holds: Callable[[], object], what: str) -> None:
    """Wait for a condition; every test that waits has the same patience."""
    deadline = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.02)


def wait_for_line(process: Process, log: Path, pattern: str) -> str:
    """The first group of a pattern, when a process has written it to its log."""
    deadline = time.monotonic() + DEADLINE
    while (found := re.search(pattern, log.read_text(errors="replace"))) is None:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
    return found[1]


def announce(path: Path, text: str) -> None:
    """Write a file that a test waits for; the test never sees a part of it."""
    unfinished = path.with_name(f".{path.name}-{os.getpid()}")
    unfinished.write_text(text)
    unfinished.replace(path)
