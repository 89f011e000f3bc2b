"""Copying KV between workers: what lies how, what is worth it, from whom, and how fast."""
