"""Calls that no graph can hold, since their Python depends on values: operators make them as they are."""
