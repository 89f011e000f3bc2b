"""Prompts that are to stay cached, on how many workers, and what is done about it."""
