"""Choosing between plans by measurement: samples, measured costs, decisions on disk."""
