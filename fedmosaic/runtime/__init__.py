"""Engines: one round as four pure functions, and several ways to run them."""
