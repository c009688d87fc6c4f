"""What all benchmarks use: rounds by turns, the stamp, result files, tables and plots."""
