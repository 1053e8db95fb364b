"""Fixtures of the worker's tests."""

from support.rank_fixtures import no_environment, one_compute_thread, ranks_are_forked

__all__ = ["no_environment", "one_compute_thread", "ranks_are_forked"]
