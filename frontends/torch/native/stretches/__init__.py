"""A lane's stretch of regions as code: what is called for each operator, little Python between."""
