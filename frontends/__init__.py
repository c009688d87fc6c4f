"""Frontends: they lower a framework's program into the graph IR and run plans on a backend."""
