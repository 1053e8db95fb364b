"""One rank's walk through its part of a plan: where the plan comes from, its lowering, and the executor.

Stages are in :mod:`zbv_worker.stage`, checkpoints in :mod:`zbv_worker.checkpoints`.
"""
