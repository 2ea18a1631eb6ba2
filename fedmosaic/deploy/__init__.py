"""Deployment: agreement, node, coordinator, messages, Flower."""
