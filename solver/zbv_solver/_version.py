"""The version. Plans state it, and they must not import the package's `__init__`."""

__version__ = "0.1.0"
