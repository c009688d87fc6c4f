"""Whether this installation works, and what it finds on this machine."""
