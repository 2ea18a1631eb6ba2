"""Audit: what a curious server reads off what it sees, and what malicious clients can do; attacks as functions."""
