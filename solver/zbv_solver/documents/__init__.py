"""JSON documents in general: field types, error messages, canonical text, and files.

This folder knows nothing about problems and plans; their documents are in `problem` and `plans`.
"""
