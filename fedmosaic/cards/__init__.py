"""Reproduction cards by name: one for every table and figure that can be checked."""
