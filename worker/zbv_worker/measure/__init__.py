"""Measures what planning needs: costs and memory of stages, links, and how well a plan meets its times.

It runs stages, and executors without training; training is in :mod:`zbv_worker.run`.
"""
