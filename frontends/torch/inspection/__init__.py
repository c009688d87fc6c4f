"""What the public functions ask of a scheduled torch callable: its plan told, checked, timed, debugged."""
