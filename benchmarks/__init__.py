"""Benchmarks of the planner, the service and the worker: ``python -m benchmarks``.

They run from a checkout and are not part of the wheel. docs/benchmarks.md explains them and shows their
results.
"""
