"""Methods that need more than an algorithm: work on the server, or a third party. Clients run the same rounds."""
