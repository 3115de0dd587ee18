"""The version, in a module that everything may import: the package itself leads to all rooms."""

__version__ = "0.1.0"
