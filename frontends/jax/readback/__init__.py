"""Compiling for a GPU that need not be there, and reading back what XLA made of a plan."""
