"""What the engine told of its pins, and of what is used most, as messages of ``WorkerControl``. Pure."""

import math
from typing import Final

from prefixmesh.cache.tier import Tier
from prefixmesh.proto.v1 import worker_control_pb2 as pb
from prefixmesh.worker.prefix_messages import HotPrefixInfo, PinInfo, PinTotals, PrefixAnswer

_NO_TOTALS: Final = PinTotals(charged_pages=0, budget_pages=0, owner_budget_pages=0, version=0)
_MS_PER_S: Final = 1e3


def encode_pins(answer: PrefixAnswer) -> pb.WorkerPinsResponse:
    """All pins, and what they take together. O(pins)."""
    totals = answer.totals or _NO_TOTALS
    return pb.WorkerPinsResponse(
        pins=map(_encode_pin, answer.pins),
        charged_pages=totals.charged_pages,
        budget_pages=totals.budget_pages,
        owner_budget_pages=totals.owner_budget_pages,
        version=totals.version,
        host_budget_pages=totals.host_budget_pages,
        host_owner_budget_pages=totals.host_owner_budget_pages,
    )


def encode_hot(answer: PrefixAnswer) -> pb.HotPrefixesResponse:
    """The prefixes that are used most. O(tokens)."""
    return pb.HotPrefixesResponse(prefixes=map(_encode_hot, answer.hot))


def _encode_hot(hot: HotPrefixInfo) -> pb.HotPrefix:
    name = hot.prefix
    prefix = pb.Prefix(
        namespace=name.namespace,
        token_ids=name.tokens,
        boundary_tokens=name.boundary_tokens,
        tail_namespace=name.tail,
        adapter_digest=hot.adapter,
    )
    return pb.HotPrefix(prefix=prefix, hits=hot.hits, owner=hot.owner)


def _encode_pin(pin: PinInfo) -> pb.WorkerPinState:
    return pb.WorkerPinState(
        pin_id=pin.pin_id,
        owner=pin.owner,
        tier=pb.TIER_HOST if pin.tier == Tier.HOST else pb.TIER_DEVICE,
        pages=pin.pages,
        held_tokens=pin.held_tokens,
        missing_tokens=pin.missing_tokens,
        # Rounded up: 0 would say that it does not end.
        expires_in_ms=math.ceil(pin.expires_in_s * _MS_PER_S),
    )
