"""Training: what every method is to the loop, and the one loop."""
