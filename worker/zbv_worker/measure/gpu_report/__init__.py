"""``zbv-worker gpu-report``: a check of the machine's GPUs against the CPU, and their costs.

It needs at least one NVIDIA GPU; profiling without that check is in :mod:`zbv_worker.measure.profile`.
"""
