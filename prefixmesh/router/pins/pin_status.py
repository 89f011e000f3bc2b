"""How far a pin is, as the wire tells it."""

from prefixmesh.cache.namespace import short_digest
from prefixmesh.proto.v1 import router_pb2 as pb
from prefixmesh.router.pins.pin_roster import KnownPin
from prefixmesh.router.pins.records import without_prompt
from prefixmesh.router.pins.wishes import ReplicaStatus, WishStatus
from prefixmesh.tokens import count

NOT_SEEN_YET = "it was wished a moment ago"


def status_of(pin: KnownPin, progress: WishStatus | None, unix_ms: int, *, with_prompt: bool) -> pb.PinStatus:
    """A pin at this time of the store's clock; ``progress`` is None where nobody has looked yet. O(prompt + replicas)."""
    spec, record, version = pin.record.spec, pin.record, pin.version
    if progress is None:
        progress = WishStatus(wanted=spec.replicas, held=0, why=NOT_SEEN_YET)
    left_ms = max(1, record.expires_unix_ms - unix_ms) if record.expires_unix_ms else 0
    return pb.PinStatus(
        spec=spec if with_prompt else without_prompt(spec),
        tokens=count(pin.tokens or b""),
        wanted=progress.wanted,
        held=progress.held,
        missing=progress.missing,
        why=pin.problem or progress.why,
        replicas=[_replica(one, pin) for one in progress.replicas],
        expires_in_ms=left_ms,
        generation=record.generation,
        namespace_digest="" if version is None else short_digest(version.namespace),
    )


def _replica(one: ReplicaStatus, pin: KnownPin) -> pb.PinReplica:
    # Workers know a prompt by a number made from it, operators by how many there were before it: an older one has none here.
    is_current = pin.version is not None and one.generation == pin.version.generation
    return pb.PinReplica(
        worker_id=one.worker_id,
        address=one.endpoint,
        held_tokens=one.held_tokens,
        state=one.state,
        problem=one.problem,
        generation=pin.record.generation if is_current else 0,
    )
