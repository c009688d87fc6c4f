"""Other libraries' jit and their objects among arguments; none of them is imported here."""
