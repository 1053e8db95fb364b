"""Fixtures of the worker benchmarks' tests."""

from support.rank_fixtures import one_compute_thread, ranks_are_forked

__all__ = ["one_compute_thread", "ranks_are_forked"]
