"""Data in: interactions, named sources, splits, negative pools."""
