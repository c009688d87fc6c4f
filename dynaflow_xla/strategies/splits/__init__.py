"""How a strategy cuts the batch: into which nano-batches, where, and when."""
