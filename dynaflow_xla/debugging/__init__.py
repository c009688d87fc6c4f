"""Runs of a plan that look for what an ordinary call hides: other orders, pauses, poisoned memory."""
