"""Settings that were found by `fedmosaic tune`; each file begins with the command that found it."""
