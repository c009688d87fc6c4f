"""One signature of a scheduled function: what all backends share, and its life from capture to call."""
