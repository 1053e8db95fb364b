"""When actions happened on all ranks, on one clock.

It records times only; runs are in :mod:`zbv_worker.run`.
"""
