"""``WorkerControl``: what members of the fleet ask a worker. Every call must carry the fleet's control token."""

import hmac
from dataclasses import dataclass

from prefixmesh.cache.fingerprint import FINGERPRINT_VERSION
from prefixmesh.errors import AuthenticationError
from prefixmesh.fleet_secret import FleetSecret
from prefixmesh.ids import Incarnation
from prefixmesh.proto.cache_counts import encode_cache_counts
from prefixmesh.proto.codec import PROTOCOL_VERSION
from prefixmesh.proto.v1 import worker_control_pb2 as pb
from prefixmesh.rpc.identity import bearer_token
from prefixmesh.rpc.status import AnyContext
from prefixmesh.worker.caller import Metadata
from prefixmesh.worker.messages import EngineInfo
from prefixmesh.worker.recent_stats import RecentStats


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """What stays the same for one life of a worker."""

    worker_id: str
    incarnation: Incarnation
    tokenizer_digest: str
    """A router must use the same tokenizer, since it sends tokens."""


class WorkerControlService:
    """Answers from the engine's own figures."""

    def __init__(
        self, *, secret: FleetSecret, identity: WorkerIdentity, info: EngineInfo, stats: RecentStats
    ) -> None:
        self._control_token = secret.control_token().encode()
        self._identity = identity
        self._info = info
        self._stats = stats

    async def Describe(  # noqa: N802  the service's own name
        self, request: pb.DescribeRequest, context: AnyContext
    ) -> pb.DescribeResponse:
        """Who this worker is and how fast it has been measured to be."""
        self._authenticate(context.invocation_metadata())
        info, identity = self._info, self._identity
        stats = await self._stats.read()
        return pb.DescribeResponse(
            worker_id=identity.worker_id,
            incarnation=identity.incarnation,
            model=info.model,
            model_revision=info.model_revision,
            context_length=info.context_length,
            page_size=info.page_size,
            prefix_cache=info.prefix_cache,
            max_total_tokens=info.max_total_tokens,
            max_running_requests=info.max_running_requests,
            protocol_version=PROTOCOL_VERSION,
            fingerprint_version=FINGERPRINT_VERSION,
            rates=pb.Rates(
                prefill_tokens_per_s=stats.prefill_tokens_per_s, decode_step_ms=stats.decode_step_ms
            ),
            pool=pb.PoolState(
                total_pages=stats.total_pages,
                free_pages=stats.free_pages,
                evictable_pages=stats.evictable_pages,
                protected_pages=stats.protected_pages,
            ),
            running_requests=stats.running,
            queued_requests=stats.queued,
            tokenizer_digest=identity.tokenizer_digest,
            cache=encode_cache_counts(stats.cache),
        )

    def _authenticate(self, metadata: Metadata | None) -> None:
        token = bearer_token(dict(metadata or ()))
        if not hmac.compare_digest(token.encode("utf-8", "surrogatepass"), self._control_token):
            raise AuthenticationError("this is not the fleet's control token")
