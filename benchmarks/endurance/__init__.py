"""Hours of random plans, changed bytes and calls, in search of faults."""
