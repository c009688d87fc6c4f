"""Who runs a graph, and graphs whose batch is open, with a plan for each number of rows."""
