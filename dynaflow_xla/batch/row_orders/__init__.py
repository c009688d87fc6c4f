"""Rows in an order that data gives: what makes it, what may happen in it, and what undoes it."""
