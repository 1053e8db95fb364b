"""JSON documents that several packages share: strict parsing, problems, packing for storage, common models.

Documents of one resource are defined with it, such as :mod:`zbv_service.runs.documents`. Nothing here does
I/O.
"""
