"""From the configuration of a transformer and a device to a problem by layers.

Everything is computed from formulas, and every formula names its source. To measure a model that exists, use
``zbv-worker profile``.
"""
