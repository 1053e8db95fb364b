"""The computation of a stage: forward, split backward, recomputation, precision.

It knows neither plans nor other ranks.
"""
