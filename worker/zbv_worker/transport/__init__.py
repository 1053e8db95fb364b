"""Moves tensors and messages between ranks, over gloo, NCCL or threads.

It knows channels but no plans; the order of transfers comes from :mod:`zbv_worker.execution`.
"""
