"""prefixmesh: serve an LLM from many GPUs so that a prompt prefix computed once is not computed again.

This module imports nothing, so that ``import prefixmesh`` costs nothing: take ``prefixmesh.client`` to call a
fleet, ``prefixmesh.router`` and ``prefixmesh.worker`` to run one.
"""

__version__ = "0.1.0"
