"""The ``prefixmesh`` command."""
