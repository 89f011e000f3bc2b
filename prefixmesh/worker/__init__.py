"""Who computes: scheduler, engine, model, sampling, the gRPC front, the Ray actor."""
