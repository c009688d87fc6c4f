"""The package version, in the one place that the build reads it from."""

__version__ = "0.1.0"
