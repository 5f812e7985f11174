"""The version, read by the build and by commands that print it."""

__version__ = "0.1.0"
