"""The version, alone in its file: the build reads the literal without importing anything."""

__version__ = "0.1.0"
