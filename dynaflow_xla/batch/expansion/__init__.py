"""The graph of all nano-batches, and the functions of its regions."""
