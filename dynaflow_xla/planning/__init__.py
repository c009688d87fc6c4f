"""From a recording to a plan, and the proof that the plan is right."""
