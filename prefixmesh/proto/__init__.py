"""The wire: generated messages and services in ``v1``, and the codec between them and domain types."""
