"""How compiled kernels are made: every one of them is compiled and cached in the same way.

Kernels themselves are next to the code that calls them.
"""
