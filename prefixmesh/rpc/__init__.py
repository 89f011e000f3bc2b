"""gRPC conventions that every hop shares: channel settings, status mapping, safe registration, who is calling."""
