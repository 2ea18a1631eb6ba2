"""Data: files and named sets in, positions inside; splits, negatives, batches."""
