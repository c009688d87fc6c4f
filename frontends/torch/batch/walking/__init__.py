"""The walk that applies batch rules to a captured graph, and the table of rules it looks into."""
