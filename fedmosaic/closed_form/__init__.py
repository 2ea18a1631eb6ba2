"""Reference recommenders that are functions of sums over clients: fast, strong, and exactly federated."""
