"""Lengths of sequences: distributions with fixed seeds, published histograms, and the problems made of them.

Nothing here searches or measures: the benchmarks of plans and packings take their inputs from this folder.
"""
