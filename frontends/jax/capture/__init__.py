"""From a JAX function to the graph IR: operators with costs, marks, source lines."""
