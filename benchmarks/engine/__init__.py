"""What the engine itself costs, from C++, from Python and inside of JAX."""
