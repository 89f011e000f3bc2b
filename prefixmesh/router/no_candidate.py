"""Why nobody can take a request, and why one worker cannot: in words, for callers and for ``explain``. Pure."""

from collections.abc import Collection

from prefixmesh.errors import UnavailableError
from prefixmesh.router.endpoint import Endpoint
from prefixmesh.router.placement import RouteRequest
from prefixmesh.router.registry import WorkerRegistry
from prefixmesh.router.worker_entry import WorkerEntry
from prefixmesh.served_model import shown_name


def no_candidate_error(
    registry: WorkerRegistry, request: RouteRequest, exclude: Collection[Endpoint]
) -> UnavailableError:
    """The error of a request that no worker can take now, apart from those in ``exclude``. O(workers)."""
    if not registry.ready:
        return registry.no_worker_error()
    left = [entry for entry in registry.ready if entry.endpoint not in exclude]
    if not left:
        return UnavailableError("no worker is ready that the caller has not excluded")
    if not any(entry.has_adapter(request.adapter, request.adapter_digest) for entry in left):
        return UnavailableError(
            f"no worker is ready that has the adapter {shown_name(request.adapter)} and that the caller has not excluded"
        )
    return UnavailableError("no worker that is ready now has a context long enough for this request")


def why_not(entry: WorkerEntry, request: RouteRequest, exclude: Collection[Endpoint]) -> str:
    """Why a worker could not take a request."""
    if entry.problem:
        return entry.problem
    if entry.endpoint in exclude:
        return "was excluded by the caller"
    if not entry.has_adapter(request.adapter, request.adapter_digest):
        return f"does not have the adapter {shown_name(request.adapter)}"
    return f"has not the room for {request.most_tokens} tokens of prompt and answer"
