"""Adapters that the whole fleet is to know: what is wished, what workers have, and what is done about the difference."""
