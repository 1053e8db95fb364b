"""Packs the sequences of a global batch into microbatches for the replicas of a pipeline.

It chooses microbatches and replicas by a fast estimate of a step, and asks `search` for the plans. How the
actions of given microbatches are ordered is the task of `search`, not of this folder.
"""
