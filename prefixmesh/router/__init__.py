"""Who decides: prefix tree, load, cost, reservations, and the gRPC service in front of the workers. No torch, no Ray."""
