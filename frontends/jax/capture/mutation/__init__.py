"""What a function changes while it is traced, and what several functions may not share therefore."""
