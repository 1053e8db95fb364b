"""The version, in a module of its own: plans state it, and they must not import the package's face."""

__version__ = "0.1.0"
