"""A model's layers as a pipeline inside the user's own training loop.

The loop, the optimizer and the data stay the user's; whole runs of ``zbv-worker`` are in
:mod:`zbv_worker.run`.
"""
