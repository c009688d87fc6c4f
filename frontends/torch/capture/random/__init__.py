"""Random numbers: the states of generators, and operators that draw."""
