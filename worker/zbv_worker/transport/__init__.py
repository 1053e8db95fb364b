"""Moves tensors and messages between ranks, over gloo or NCCL.

It knows channels but no plans; the order of transfers comes from :mod:`zbv_worker.execution`.
"""
