"""One request's passage through one worker: what each frame of the stream teaches the core, and what the caller gets to see.

It neither waits nor sends. Frames are serialised ``GenerateResponse`` messages: those with text pass as they came; the first gets
the routing added, the last what only the router knows. Each branch of a request has an answer of its own, remembered and named for
itself. However the passage ends, it settles exactly once.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from prefixmesh.errors import InternalError
from prefixmesh.ids import RequestId
from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.router.placement import Placement
from prefixmesh.router.prepare import PreparedRequest, RequestPreparer
from prefixmesh.router.routing import RouterCore
from prefixmesh.text.prompts import PromptBuilder
from prefixmesh.tokens import unpack


@dataclass(slots=True)
class _Answer:
    """What has passed of one branch."""

    ids: list[bytes] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    is_remembered: bool = False


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
        self._answers: defaultdict[int, _Answer] = defaultdict(_Answer)
        self._has_token = False
        self._is_closed = False
        self.cached_tokens = 0
        """What the worker said it found."""

        self.is_finished = False
        """Whether the worker has sent the stream's last message."""

    def on_frame(self, frame: bytes) -> bytes:
        """Take note of a frame; what to send on. O(frame), and O(answers) for the last."""
        message = pb.GenerateResponse.FromString(frame)
        match message.WhichOneof("event"):
            case "delta":
                self._on_delta(message.delta)
                return frame
            case "branch_ended":
                self._remember(self._answers[message.branch_ended.branch])
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
        self.cached_tokens = started.cached_tokens.device + started.cached_tokens.host
        self._core.accepted(self._placement, self.cached_tokens, self._clock())
        started.request_id = self._request_id
        started.model = self._model
        started.routing.policy = self._core.policy
        started.routing.predicted_cached_tokens = self._placement.predicted_cached_tokens
        started.routing.predicted_first_token_ms = self._placement.predicted_first_token_ms

    def _on_delta(self, delta: pb.Delta) -> None:
        if not self._has_token:
            self._has_token = True
            self._core.first_token(self._placement, self._clock())
        answer = self._answers[delta.branch]
        answer.ids.append(delta.token_ids)
        answer.texts.append(delta.text)

    def _on_finished(self, finished: pb.Finished) -> None:
        if self._is_closed:
            raise InternalError("the worker ended the stream twice")
        answers = list(self._answers.values()) or [_Answer()]
        named = [self._preparer.name_answer(self._prepared, b"".join(answer.ids)) for answer in answers]
        # Before the caller sees the end, so that its next turn finds what this one left.
        self._is_closed = self.is_finished = True
        self._core.finished(self._placement, self._clock(), named)
        finished.usage.retokenized_tokens = self._prepared.prompt.retokenized_tokens
        for answer in answers:
            self._remember(answer)

    def _remember(self, answer: _Answer) -> None:
        # After a resumption the text from before the interruption is not known here.
        if answer.is_remembered or self._prepared.resumed:
            return
        answer.is_remembered = True
        self._prompts.remember(
            self._prepared.namespace,
            self._prepared.prompt,
            "".join(answer.texts),
            unpack(b"".join(answer.ids)).tolist(),
        )
