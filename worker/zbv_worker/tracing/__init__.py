"""When actions happened on all ranks, on one clock.

It records times only; reports of losses and steps are in :mod:`zbv_worker.training`.
"""
