"""What regions are made of: traceable functions, and the order of what is inside of them."""
