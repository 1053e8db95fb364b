"""Models of other libraries as layers of a pipeline.

The libraries are imported on first use; the layers' computation is in :mod:`zbv_worker.stage`.
"""
