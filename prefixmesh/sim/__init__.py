"""The cores that serve, in simulated time: one seeded event loop with a virtual clock, and a network that can be made to fail."""
