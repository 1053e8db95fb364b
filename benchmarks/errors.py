"""The errors of benchmarks; :func:`benchmarks.cli.main` turns them into messages and exit statuses."""

from __future__ import annotations


class BenchmarkError(Exception):
    """The measurement failed (exit status 1)."""


class WrongInput(BenchmarkError):
    """The command's input is wrong (exit status 2)."""
