"""Mosaic, next items by sums: `method` is the recommender, `full` and `factored` are how it learns."""
