"""``zbv-worker profile``: measures the costs of stages, layers and links on real ranks.

Estimates without running anything are in :mod:`zbv_worker.measure.estimate`.
"""
