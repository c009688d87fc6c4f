"""Strategies: the interface and the built-in ones."""
