"""From a model's configuration and a device to a problem given by layers.

``config`` is what a user says, ``presets`` what ships with the package; ``parameters``, ``activations``,
``flops``, ``traffic`` and ``times`` each hold one kind of formula with its source; ``layers`` puts them
together, and ``document`` writes the problem that ``zbv plan`` takes. Nothing here measures: for a model that
exists, ``zbv-worker profile`` does.
"""
