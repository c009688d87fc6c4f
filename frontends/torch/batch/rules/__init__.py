"""What aten operators do to the axis that holds the rows of a batch: one rule for each operator."""
