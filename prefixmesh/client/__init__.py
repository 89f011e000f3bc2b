"""The library that callers import. No torch, no Ray."""
