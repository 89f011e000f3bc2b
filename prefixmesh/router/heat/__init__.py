"""Which prefixes and adapters are asked for more than their holders can serve, and on how many workers they should be."""
