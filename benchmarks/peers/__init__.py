"""Models in what users would pick instead."""
