"""How kernels are compiled and cached, and the array types that they take.

Kernels themselves are next to the code that calls them.
"""
