"""What is kept: in memory while it is used, on disk for later processes of the same user."""
