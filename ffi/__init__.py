"""The run-time side: engine binding, lane clients and the XLA custom calls."""
