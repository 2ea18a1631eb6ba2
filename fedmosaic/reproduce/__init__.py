"""Reproduction: cards of the papers' claims, their drawings, the page of results."""
