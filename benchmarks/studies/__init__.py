"""How good choices, plans and published strategies are."""
