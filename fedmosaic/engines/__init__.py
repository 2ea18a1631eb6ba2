"""Engines: the same round, run for one client at a time, in blocks, compiled, or over processes."""
