"""What every room stands on: errors, files that are whole or absent, ragged arrays, keyed randomness, buffers."""
