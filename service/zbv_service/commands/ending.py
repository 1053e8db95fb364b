"""How a command ends: its exit status and its error message."""

from __future__ import annotations

import signal

DONE, FAILED, WRONG_INPUT, INFEASIBLE = 0, 1, 2, 3
"""Exit statuses. ``zbv`` has the same, except for FAILED."""
INTERRUPTED = 128 + signal.SIGINT

EPILOG = """\
exit status: 0 done; 1 the service cannot be reached or failed; 2 the input is wrong;
3 no plan fits the memory limit; 130 interrupted."""


class Stop(Exception):
    """Ends a command with a message and a status."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class WrongInput(Stop):
    """Ends a command because its input is wrong. The message names the flag or file and says what to do."""

    def __init__(self, message: str):
        super().__init__(WRONG_INPUT, message)
