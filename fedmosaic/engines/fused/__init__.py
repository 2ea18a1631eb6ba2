"""The compiled engine: programs lowered from algorithms, one client at a time inside a core's cache."""
