"""A name of the past for ``policy``."""

from prefixmesh.router.policy import prefix_key

__all__ = ["prefix_key"]
