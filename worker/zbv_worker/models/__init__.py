"""Ready-made models for trying the worker, for the demonstration and for benchmarks.

The protocol that they follow is :mod:`zbv_worker.model`.
"""
