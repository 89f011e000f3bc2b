"""Where KV lives: the tiers of a worker's cache, as small integers, so that they may index a list.

A block may be on both at once. The order is that of nearness to the computation: the lower, the sooner it can be read.
"""

import enum


class Tier(enum.IntEnum):
    """A tier of a worker's cache; the values are what goes over the wire, so they never change."""

    DEVICE = 0
    HOST = 1
