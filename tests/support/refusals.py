"""Commands that refuse their input, run in the process of the test."""

from __future__ import annotations

import logging
import signal

import pytest
from zbv_service.commands.cli import main


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit status and standard error of a ``zbv-service`` command that prints nothing else."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    root, level = logging.getLogger(), logging.getLogger().level
    hidden = list(root.handlers)
    try:
        status = main(arguments)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        root.handlers[:] = hidden
        root.setLevel(level)
    said = capsys.readouterr()
    assert said.out == ""
    return status, said.err
