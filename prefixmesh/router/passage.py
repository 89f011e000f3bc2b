"""An answer's way to its caller over all attempts: what each frame of a worker's stream teaches, and what the caller gets to see of it.

It neither waits nor sends. Frames are serialised ``GenerateResponse`` messages. Those of the first attempt that carry text pass as they
came, and are kept so; Started gets the routing added, Finished what only the router knows. Those of a later attempt are read, and told as
the continuation that they are (``answer_record``). What the text was is read at the end, and only where somebody wants to know: each branch
of a chat has an answer that is remembered, and one that fills a block is named.
"""

from collections.abc import Callable
from typing import Final

from prefixmesh.answer_record import AnswerRecord, LivedTimes
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.router.attempts import Attempts
from prefixmesh.router.frames import FrameKind, kind_of
from prefixmesh.router.placement import PLAIN, Placement
from prefixmesh.router.prepare import PreparedRequest, RequestPreparer
from prefixmesh.router.request_numbers import Answered
from prefixmesh.text.prompts import PromptBuilder
from prefixmesh.tokens import count, unpack

_CHANGED: Final = frozenset({"started", "finished"})
"""Events that the caller gets with something added; an event of a later protocol passes as it is."""


class Passage:
    """State of one answer. ``sent`` before each attempt, then ``on_first_frame`` or ``on_later_frame`` with every frame."""

    def __init__(
        self,
        attempts: Attempts,
        prepared: PreparedRequest,
        *,
        preparer: RequestPreparer,
        prompts: PromptBuilder,
        clock: Callable[[], float],
        model: str,
        policy: str,
        notes_tokens: bool,
    ) -> None:
        """``model`` and ``policy`` are told in Started; ``notes_tokens`` says that the history wants every token."""
        self.prepared = prepared
        self._attempts = attempts
        self._preparer = preparer
        self._prompts = prompts
        self._clock = clock
        self._model = model
        self._policy = policy
        self._notes_tokens = notes_tokens
        self._lived = LivedTimes(asked_s=clock())
        self._record = AnswerRecord(prepared.route.branches, prepared.resumed, self._lived)
        self._remembered: set[int] = set()
        self.placement: Placement | None = None
        self._has_token = False
        self.cached_tokens = 0
        """What the last worker said it found."""

        self.is_finished = False
        """Whether the answer's last message was told."""

    @property
    def owes_news(self) -> bool:
        """Whether the attempt has begun to answer, so that its next message is due; after the last one the stream's end is."""
        return self._has_token or self.is_finished

    @property
    def is_whole(self) -> bool:
        """Whether nothing but Finished is left to be told, and ``whole_end`` can tell it."""
        return self._record.is_whole

    @property
    def sent_tokens(self) -> int:
        """Tokens of the longest answer so far. O(what was not read before)."""
        return max(branch.new_tokens for branch in self._record.branches)

    @property
    def answers(self) -> list[Answered]:
        """Each answer so far, and the names of its blocks. O(prompt + answers)."""
        prepared, chain = self.prepared, 1 if self.prepared.route.public else PLAIN
        return [
            Answered(
                count(branch.packed),
                self._preparer.name_answer(prepared, branch.packed[len(brought) :], number, chain),
            )
            for number, (branch, brought) in enumerate(
                zip(self._record.branches, prepared.resumed, strict=True)
            )
        ]

    def sent(self, placement: Placement) -> None:
        """An attempt begins there."""
        self.placement = placement
        self._has_token = False

    def request_to_go_on(self) -> bytes:
        """The serialised request of a further attempt: it goes on from what was told. O(prompt + answer).

        Raises UnavailableError when nobody can go on from that.
        """
        record = self._record
        record.interrupted()
        request = pb.GenerateRequest.FromString(self.prepared.wire)
        record.resume(request)
        if record.has_token:
            self._attempts.resumed_at([branch.length for branch in record.branches])
        return request.SerializeToString()

    def on_first_frame(self, frame: bytes) -> bytes | None:
        """Take note of a frame of the first attempt; what to send on, None for nothing. O(1) for one with text, O(answers) for the last.

        Raises DecodeError for what is no message, where it must be read.
        """
        if self.is_finished:
            return None  # nothing follows the end, whatever a worker says
        if kind_of(frame) is FrameKind.DELTA:
            delta = pb.GenerateResponse.FromString(frame).delta if self._notes_tokens else None
            if not self._has_token:
                self._on_first_token()
            if delta is not None:
                self._note(delta)
            self._record.told(frame)
            return frame
        message = pb.GenerateResponse.FromString(frame)
        self._record.told(frame)
        event = message.WhichOneof("event")
        if event == "started":
            self._on_started(message.started)
        elif event == "delta" and not self._has_token:
            self._on_first_token()
        self._after_told(event, message)
        return message.SerializeToString() if event in _CHANGED else frame

    def on_later_frame(self, frame: bytes) -> bytes | None:
        """Take note of a frame of a later attempt; what to send, None for nothing. O(its size), and O(answers) for the last.

        Raises UnavailableError when it does not go on where the answer was interrupted, DecodeError for what is no message.
        """
        if self.is_finished:
            return None
        message = pb.GenerateResponse.FromString(frame)
        event = message.WhichOneof("event")
        if event == "started":
            self._on_started(message.started)
        elif event == "delta" and not self._has_token:
            self._on_first_token()
        if self._record.continued(message, self._clock()) is None:
            return None
        self._after_told(event, message)
        return message.SerializeToString()

    def whole_end(self) -> bytes:
        """The Finished of an answer that ``is_whole`` and whose worker died before it said so."""
        end = self._record.whole_end(self._clock())
        self._on_finished(end.finished)
        return end.SerializeToString()

    def _after_told(self, event: str | None, message: pb.GenerateResponse) -> None:
        if event == "finished":
            self._on_finished(message.finished)
        elif event == "branch_ended":
            self._remember(message.branch_ended.branch)
        elif event == "delta" and self._notes_tokens:
            self._note(message.delta)

    def _on_started(self, started: pb.Started) -> None:
        placement = self.placement
        assert placement is not None
        now = self._clock()
        if self._lived.started_s is None:
            self._lived.started_s = now
        tiers = started.cached_tokens
        told = tiers.device + tiers.host + tiers.disk + tiers.peer
        # One worker that miscounts must not spoil the sums of all its requests.
        most = placement.request.prompt_tokens + max(map(count, self.prepared.resumed))
        self.cached_tokens = min(max(0, told), most)
        self._attempts.accepted(self.cached_tokens, now)
        started.request_id = self._attempts.request_id
        started.model = self._model
        routing = started.routing
        routing.policy = self._policy
        routing.predicted_cached_tokens = placement.predicted_cached_tokens
        routing.predicted_first_token_ms = placement.predicted_first_token_ms

    def _on_first_token(self) -> None:
        self._has_token = True
        now = self._clock()
        if self._lived.first_token_s is None:
            self._lived.first_token_s = now
        self._attempts.first_token(now)

    def _on_finished(self, finished: pb.Finished) -> None:
        prepared, named = self.prepared, []
        if self._preparer.may_fill_block(prepared, finished.usage.completion_tokens):
            assert self.placement is not None
            chain = self.placement.decision.chain
            named = [
                self._preparer.name_answer(prepared, branch.packed[len(brought) :], number, chain)
                for number, (branch, brought) in enumerate(
                    zip(self._record.branches, prepared.resumed, strict=True)
                )
            ]
        # Before the caller sees the end, so that its next turn finds what this one left.
        self.is_finished = True
        self._attempts.finished(self._clock(), named)
        finished.usage.retokenized_tokens = prepared.prompt.retokenized_tokens
        if self._is_worth_remembering:
            for number in range(prepared.route.branches):
                self._remember(number)

    @property
    def _is_worth_remembering(self) -> bool:
        """Of a chat, for its next turn. What the text was that the caller brought along the beginning of is not known here."""
        return self.prepared.prompt.history is not None and not any(self.prepared.resumed)

    def _remember(self, number: int) -> None:
        if number in self._remembered or not self._is_worth_remembering:
            return
        branches = self._record.branches
        if not 0 <= number < len(branches):
            return  # a worker may number its answers as it likes
        self._remembered.add(number)
        branch, prepared = branches[number], self.prepared
        ids: list[int] = unpack(branch.packed).tolist()
        self._prompts.remember(prepared.namespace, prepared.prompt, branch.text, ids)

    def _note(self, delta: pb.Delta) -> None:
        if delta.token_ids:
            self._attempts.told(delta.branch, delta.position, count(delta.token_ids))
