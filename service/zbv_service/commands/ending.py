"""How a command ends."""

from __future__ import annotations

DONE, FAILED, WRONG_INPUT, INFEASIBLE = 0, 1, 2, 3
"""Exit statuses; 0, 2 and 3 are those of ``zbv``."""

EPILOG = """\
exit status: 0 done; 1 the service cannot be reached or failed; 2 the input is wrong;
3 no plan fits the memory limit."""


class Stop(Exception):
    """Ends a command with a message and a status."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class WrongInput(Stop):
    """The command's input is wrong; the message says what to do."""

    def __init__(self, message: str):
        super().__init__(WRONG_INPUT, message)
