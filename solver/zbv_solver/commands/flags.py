"""Errors about options, named as the user wrote them: by the command-line flag."""

from __future__ import annotations

from zbv_solver.errors import InvalidInput, Issue


def named_flags(error: InvalidInput) -> InvalidInput:
    """The same error with flags in place of pointers: ``/time_limit`` becomes ``--time-limit``."""
    issues = [Issue("", issue.detail, flag_of(issue.pointer[1:])) for issue in error.issues]
    return InvalidInput(issues, error.more, error.is_partial)


def flag_of(key: str) -> str:
    """The flag of a key of an options document."""
    return f"--{key.replace('_', '-')}"
