"""Beside other work and other calls, and what memory costs."""
