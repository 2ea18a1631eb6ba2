"""Privacy: what is done to an upload before it leaves a device."""
