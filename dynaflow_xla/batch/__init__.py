"""What a split over the batch does to values: states of values, and how operators change them."""
