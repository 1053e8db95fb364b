"""``zbv-worker estimate``: memory and FLOPs of stages and layers, found without memory or values.

Measured times are in :mod:`zbv_worker.measure.profile`.
"""
