"""What a captured function changes: state, and arguments that share memory."""
