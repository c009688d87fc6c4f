"""Commands that measure: times beside the original, several results beside each other, a page of them."""
