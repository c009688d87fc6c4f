"""What Dynamo captures of a callable: where it starts, the graphs that come, and which of them calls run."""
