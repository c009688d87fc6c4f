"""A plan as one XLA program whose order the plan decides."""
