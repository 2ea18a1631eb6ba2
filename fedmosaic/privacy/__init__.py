"""Privacy: what noise and clipping do to an upload."""
