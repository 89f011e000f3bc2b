"""Copies between the tiers, and to and from elsewhere, as the tree sees them: what is held while one is in flight, and what its end
changes.

Only indices are moved here; who copies bytes (a thread, a stream) and when belongs to the worker. ``copies`` says what each kind
owns and locks while it is in flight: whatever happens meanwhile (the range may be split, the same prefix may be inserted by
somebody else, the cache may be flushed), every page has one owner.
"""

from prefixmesh.cache.copies import Copy as Copy
from prefixmesh.cache.copies import Fetch as Fetch
from prefixmesh.cache.copies import HostRead as HostRead
from prefixmesh.cache.copies import Offload as Offload
from prefixmesh.cache.copies import Restore as Restore
from prefixmesh.cache.copy_book import MAX_COPIES as MAX_COPIES
from prefixmesh.cache.copy_book import TreeCalls as TreeCalls
from prefixmesh.cache.fetches import Fetches
from prefixmesh.cache.rescues import Rescues
from prefixmesh.cache.restores import Restores


class Transfers(Rescues, Restores, Fetches):
    """The copies of one cache.

    * a backup: ``begin_offload``, ``finish_offload``, ``abort_offload``
    * a backup of what is about to leave the device: ``keep``, ``next_to_go``, ``begin_rescue``; it ends as any backup
    * a load-back: ``begin_restore``, ``finish_restore``, ``fail_restore``
    * KV from elsewhere: ``begin_fetch``, ``finish_fetch``, ``fail_fetch``
    * host copies read for elsewhere: ``begin_read``, ``end_read``
    """
