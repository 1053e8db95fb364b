"""Turns steps into a training run: gradients, optimizer, replicas, checkpoints, changes of plan.

A single step is run by :mod:`zbv_worker.execution`.
"""
