"""One request's passage through one worker: what each frame of the stream teaches the core, and what the caller gets to see.

It neither waits nor sends. Frames are serialised ``GenerateResponse`` messages: those with text pass as they came and are kept so; the
first gets the routing added, the last what only the router knows. What the text was is read at the end, and only where somebody wants to
know: each branch of a chat has an answer that is remembered, and one that fills a block is named. However the passage ends, it settles
exactly once.
"""

from collections.abc import Callable

from prefixmesh.errors import InternalError
from prefixmesh.ids import RequestId
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.router.frames import Answer, FrameKind, kind_of, read_answers
from prefixmesh.router.placement import Placement
from prefixmesh.router.prepare import PreparedRequest, RequestPreparer
from prefixmesh.router.routing import RouterCore
from prefixmesh.text.prompts import PromptBuilder
from prefixmesh.tokens import count


class Passage:
    """State of one attempt. Feed it every frame with ``on_frame``, and ``close`` it whatever happens."""

    def __init__(
        self,
        *,
        core: RouterCore,
        clock: Callable[[], float],
        placement: Placement,
        prepared: PreparedRequest,
        preparer: RequestPreparer,
        prompts: PromptBuilder,
        request_id: RequestId,
        model: str,
    ) -> None:
        self._core = core
        self._clock = clock
        self._placement = placement
        self._prepared = prepared
        self._preparer = preparer
        self._prompts = prompts
        self._request_id = request_id
        self._model = model
        # The frames with text that were not read yet, and by branch what those said that were.
        self._deltas: list[bytes] = []
        self._answers: dict[int, Answer] = {}
        self._remembered: set[int] = set()
        self._has_token = False
        self._is_closed = False
        self.cached_tokens = 0
        """What the worker said it found."""

        self.is_finished = False
        """Whether the worker has sent the stream's last message."""

    def on_frame(self, frame: bytes) -> bytes:
        """Take note of a frame; what to send on. O(1) for one with text, O(answers) for the last."""
        if kind_of(frame) is FrameKind.DELTA:
            self._on_delta(frame)
            return frame
        message = pb.GenerateResponse.FromString(frame)
        match message.WhichOneof("event"):
            case "delta":
                self._on_delta(frame)
                return frame
            case "branch_ended":
                self._remember(message.branch_ended.branch)
                return frame
            case "started":
                self._on_started(message.started)
            case "finished":
                self._on_finished(message.finished)
            case _:
                return frame  # an event of a later protocol: not ours to drop
        return message.SerializeToString()

    def close(self) -> None:
        """The passage is over; without a ``Finished`` before, it has failed."""
        if not self._is_closed:
            self._is_closed = True
            self._core.failed(self._placement, self._clock())

    def _on_started(self, started: pb.Started) -> None:
        told = started.cached_tokens.device + started.cached_tokens.host
        # One worker that miscounts must not spoil the sums of all its requests.
        self.cached_tokens = min(max(0, told), self._most_cached)
        self._core.accepted(self._placement, self.cached_tokens, self._clock())
        started.request_id = self._request_id
        started.model = self._model
        started.routing.policy = self._core.policy
        started.routing.predicted_cached_tokens = self._placement.predicted_cached_tokens
        started.routing.predicted_first_token_ms = self._placement.predicted_first_token_ms

    def _on_delta(self, frame: bytes) -> None:
        if not self._has_token:
            self._has_token = True
            self._core.first_token(self._placement, self._clock())
        self._deltas.append(frame)

    def _on_finished(self, finished: pb.Finished) -> None:
        if self._is_closed:
            raise InternalError("the worker ended the stream twice")
        named = []
        if self._preparer.may_fill_block(self._prepared, finished.usage.completion_tokens):
            named = [
                self._preparer.name_answer(self._prepared, answer.packed, branch)
                for branch, answer in self._read().items()
            ]
        # Before the caller sees the end, so that its next turn finds what this one left.
        self._is_closed = self.is_finished = True
        self._core.finished(self._placement, self._clock(), named)
        finished.usage.retokenized_tokens = self._prepared.prompt.retokenized_tokens
        if self._is_worth_remembering:
            for branch in self._read():
                self._remember(branch)

    @property
    def _most_cached(self) -> int:
        return self._prepared.route.prompt_tokens + max(map(count, self._prepared.resumed))

    @property
    def _is_worth_remembering(self) -> bool:
        """Of a chat, for its next turn. After a resumption the text from before the interruption is not known here."""
        return self._prepared.prompt.history is not None and not any(self._prepared.resumed)

    def _remember(self, branch: int) -> None:
        if branch in self._remembered or not self._is_worth_remembering:
            return
        self._remembered.add(branch)
        answer = self._read().get(branch, Answer())
        self._prompts.remember(self._prepared.namespace, self._prepared.prompt, answer.text, answer.ids)

    def _read(self) -> dict[int, Answer]:
        """What has passed, by branch. O(what was not read before)."""
        read_answers(self._deltas, self._answers)
        self._deltas.clear()
        return self._answers
