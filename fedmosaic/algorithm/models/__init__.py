"""Models: parameters and a score, written once for one client or thousands."""
