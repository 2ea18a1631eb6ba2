"""fedmosaic: federated recommendation."""
