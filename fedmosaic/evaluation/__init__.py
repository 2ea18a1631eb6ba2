"""Evaluation: ranks of held-out items, metrics with intervals and tests, spectra of tables."""
