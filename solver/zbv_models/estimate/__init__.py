"""From the configuration of a model, its parallelism and a device to a problem by layers.

Everything is computed from formulas, and every formula names its source. To measure a model that exists, use
``zbv-worker profile``. Pydantic models are the edge (:mod:`~zbv_models.estimate.config`); a search calls
:func:`~zbv_models.estimate.layers.estimate_model` with plain records.
"""
