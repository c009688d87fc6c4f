"""One captured graph: planned, runnable, by class of sizes."""
