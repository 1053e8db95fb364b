"""Large JSON documents that several packages share: strict parsing, problems and layouts, packing for storage.

Nothing here does I/O.
"""
