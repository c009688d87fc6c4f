"""The framework-neutral graph: its forms, the rules that cut it, and the cut into regions."""
