"""Deployment: folders, keys and certificates, the processes that run, and the gate before them."""
