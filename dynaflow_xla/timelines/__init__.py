"""Timelines: predicted by the simulator or measured, and their pictures, pages and traces."""
