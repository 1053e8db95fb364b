"""Runs a plan on PyTorch's own pipelining runtime (``--runtime torch``).

It is an alternative to :mod:`zbv_worker.execution`, with fewer features.
"""
