"""KV beyond the device's memory: what is backed up, brought back, and kept over restarts."""
