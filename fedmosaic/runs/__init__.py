"""Runs: settings, one run and its folder, many runs side by side, the ledger of finished ones, comparisons."""
