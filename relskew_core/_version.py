"""The version of the library, written once."""

__version__ = "0.1.0"
