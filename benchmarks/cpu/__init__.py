"""Schedules against the best plain setting, on a CPU."""
