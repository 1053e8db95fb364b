"""The soak test: compares bounds and plans of random problems with an independent exact model.

``python -m benchmarks soak --minutes N`` runs it. :mod:`.draw` draws problems, :mod:`.pipeline` and
:mod:`.optimum` are the independent model, :mod:`.cuts` enumerates the cuts of layers, :mod:`.checks`
compares, and :mod:`.run` counts, stops at the first contradiction and replays it.
"""
