"""Large JSON documents that packages share: strict parsing, problems and layouts, packing for storage.

Nothing here does I/O.
"""
