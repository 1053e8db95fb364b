"""The advisor: models, clusters and other programs' pipelines, on top of the planner :mod:`zbv_solver`.

It estimates the layers of a model from its configuration, cuts layers for executors whose orders are fixed,
and searches the parallel layouts of a model on a cluster. The planner does not know it; the command ``zbv``
and the service attach it.
"""
