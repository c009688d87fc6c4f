"""Benchmarks on a GPU, and what takes its place where there is none."""
