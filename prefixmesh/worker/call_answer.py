"""What a call has to say of its answers, one or several: Started once, their deltas, an end for each, Finished once.

Pure, like ``answer_stream``, which knows one answer and nothing of the others. The branches of a call share their prompt, so what
the call tells of it (tokens found in the cache, what they saved) is what the branch that was admitted first has met: it computes what was
missing, and the others find it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from prefixmesh.cache.namespace import short_digest
from prefixmesh.ids import Namespace, RequestId
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.worker.answer_stream import AnswerStream
from prefixmesh.worker.engine_client import RequestEvent
from prefixmesh.worker.messages import Admitted, Ended
from prefixmesh.worker.prefill_savings import PrefillShape, prefill_savings

_REASONS: Final = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What is known of a call's answers before the engine says anything."""

    request_id: RequestId
    worker_id: str
    model: str
    namespace: Namespace
    adapter_digest: str
    """Empty for the base model."""

    prompt_tokens: int
    retokenized_tokens: int
    resumed_tokens: int
    seed: int
    prefill_shape: PrefillShape
    prepared_ms: float
    """Milliseconds from the call's arrival to its submission to the engine, which knows nothing of them."""

    peer_begin: int = 0
    peer_end: int = 0
    """The prompt's tokens between them were copied from another worker for this call; to the engine they lie on its device."""


class CallAnswer:
    """State of one call. Feed it every branch's events in their order, until ``finished``."""

    def __init__(self, head: AnswerHead, branches: Sequence[AnswerStream]) -> None:
        self._head = head
        self.branches = branches
        """The answers, by branch; at least one."""

        self._met: Admitted | None = None
        """What the first admitted branch found; None before."""

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that the first admitted branch found in the cache, on whichever tier; None before."""
        return None if self._met is None else self._met.cached_tokens

    @property
    def finished(self) -> Literal["stop", "length"] | None:
        """How the first branch ended, once all have; None before."""
        if any(branch.finished is None for branch in self.branches):
            return None
        return self.branches[0].finished

    @property
    def completion_tokens(self) -> int:
        """Tokens generated for this call so far, in all branches."""
        return sum(branch.completion_tokens for branch in self.branches)

    def on_event(self, branch: int, event: RequestEvent) -> list[pb.GenerateResponse]:
        """The messages that an event of ``branch`` gives rise to, in order. Raises the error that the call ends with."""
        answer = self.branches[branch]
        messages = [pb.GenerateResponse(delta=delta) for delta in answer.on_event(event)]
        if answer.admitted is not None and self._met is None:
            self._met = answer.admitted
            return [self._started(self._met), *messages]
        if answer.finished is not None:
            if len(self.branches) > 1:
                messages.append(_branch_ended(branch, answer))
            if self.finished is not None:
                messages.append(self._finished())
        return messages

    def _started(self, met: Admitted) -> pb.GenerateResponse:
        head = self._head
        started = pb.Started(
            request_id=head.request_id,
            worker_id=head.worker_id,
            model=head.model,
            prompt_tokens=head.prompt_tokens,
            cached_tokens=_cached_tokens(met, head),
            namespace_digest=short_digest(head.namespace),
            seed=head.seed,
            adapter_digest=head.adapter_digest,
        )
        return pb.GenerateResponse(started=started)

    def _finished(self) -> pb.GenerateResponse:
        head, met = self._head, self._met
        assert met is not None, "what has ended well has begun"
        saved = prefill_savings(head.prompt_tokens, met.cached_tokens, head.prefill_shape)
        usage = pb.Usage(
            prompt_tokens=head.prompt_tokens,
            cached_tokens=_cached_tokens(met, head),
            completion_tokens=self.completion_tokens,
            resumed_tokens=head.resumed_tokens,
            retokenized_tokens=head.retokenized_tokens,
            prefill_saved=pb.PrefillSavings(
                linear=saved.linear, attention=saved.attention, total=saved.total
            ),
        )
        finished = pb.Finished(reason=_reason(self.branches[0]), usage=usage, timings=self._timings())
        return pb.GenerateResponse(finished=finished)

    def _timings(self) -> pb.Timings:
        """What the caller has waited for: the first token of any branch, and the last of all. Branches arrive together."""
        told = [_times(branch) for branch in self.branches]
        admitted, first = min(told, key=lambda one: one[1].first_token_ms or math.inf)
        begin_ms = first.first_token_ms
        decode_ms = max(ended.first_token_ms - begin_ms + ended.decode_ms for _, ended in told)
        return pb.Timings(
            queued_ms=self._head.prepared_ms + admitted.queued_ms,
            prefill_ms=first.prefill_ms,
            first_token_ms=self._head.prepared_ms + begin_ms,
            decode_ms=decode_ms,
            load_back_ms=admitted.load_back_ms,
        )


def _cached_tokens(met: Admitted, head: AnswerHead) -> pb.CachedTokens:
    """What was found, by tier: each token on the nearest that had it before the call came. What was copied for it, and evicted again before
    it was admitted, is none of it."""
    device = met.cached_tokens - met.host_tokens - met.disk_tokens
    peer = max(0, min(head.peer_end, device) - head.peer_begin)
    return pb.CachedTokens(device=device - peer, host=met.host_tokens, disk=met.disk_tokens, peer=peer)


def _branch_ended(branch: int, answer: AnswerStream) -> pb.GenerateResponse:
    ended = pb.BranchEnded(branch=branch, reason=_reason(answer), completion_tokens=answer.completion_tokens)
    return pb.GenerateResponse(branch_ended=ended)


def _times(answer: AnswerStream) -> tuple[Admitted, Ended]:
    assert answer.admitted is not None, "what has ended well has begun"
    assert answer.ended is not None, "all branches have"
    return answer.admitted, answer.ended


def _reason(answer: AnswerStream) -> pb.FinishReason:
    assert answer.finished is not None
    return _REASONS[answer.finished]
