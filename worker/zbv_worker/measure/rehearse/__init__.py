"""``zbv-worker rehearse``: runs a plan with real transfers and sleeps instead of compute, without a model.

Traces of training runs are in :mod:`zbv_worker.tracing`.
"""
