"""Runs a plan on PyTorch's own pipelining runtime.

It is an alternative to :mod:`zbv_worker.execution`, with fewer features.
"""
