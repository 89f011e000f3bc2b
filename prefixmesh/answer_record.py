"""What a caller has been told of an answer, so that another worker can go on with it and the caller notices nothing. Pure.

An answer that is interrupted after its first token goes on elsewhere with ``GenerateRequest.resumed_output``, or ``resumed_branches``
where there are several: the worker computes what is not cached of prompt and tokens, and sends what comes next. The record holds what was told,
makes the request that goes on from it, and turns what a later attempt says into what the caller is still to be told: one Started, each
token and each piece of text once, one end.

Whoever passes an answer on notes every message: the proxy as the bytes that it passes, which are read only once somebody asks, and a client
as what it has parsed anyway. It is not here what is tried again and where; that is ``router.attempts`` and ``client.direct``.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError

from prefixmesh import tokens
from prefixmesh.errors import UnavailableError
from prefixmesh.proto.v1 import inference_pb2 as pb

MAX_COUNTED: Final = 1_000_000
"""Interruptions of one answer that a server is believed."""

_MS_PER_S: Final = 1000.0


@dataclass(slots=True, kw_only=True)
class LivedTimes:
    """When an answer came, in seconds by one clock of whoever passes it on: what its caller has waited, attempts together."""

    asked_s: float
    started_s: float | None = None
    first_token_s: float | None = None

    def timings(self, ended_s: float) -> pb.Timings:
        """What the caller is told of an answer that had more attempts than one."""
        started_s = ended_s if self.started_s is None else self.started_s
        first_s = ended_s if self.first_token_s is None else self.first_token_s
        return pb.Timings(
            queued_ms=(started_s - self.asked_s) * _MS_PER_S,
            prefill_ms=(first_s - started_s) * _MS_PER_S,
            first_token_ms=(first_s - self.asked_s) * _MS_PER_S,
            decode_ms=(ended_s - first_s) * _MS_PER_S,
        )


class ToldBranch:
    """What was told of one answer."""

    def __init__(self, resumed: bytes = b"") -> None:
        self._resumed_tokens = tokens.count(resumed)
        self._ids = [resumed] if resumed else []
        self._texts: list[str] = []
        self.length = self._resumed_tokens
        """Position of the next token: those of the answer so far, what the caller brought along included."""

        self.has_rest = False
        """Whether the text that was held back to the end was told: nothing can follow but the end."""

        self.ended: pb.BranchEnded | None = None
        """As it was told; only where there are several branches."""

    @property
    def packed(self) -> bytes:
        """All ids of the answer, packed, what the caller brought along first. O(tokens)."""
        return b"".join(self._ids)

    @property
    def text(self) -> str:
        """All text that was told. O(its length)."""
        return "".join(self._texts)

    @property
    def new_tokens(self) -> int:
        """Tokens without those that the caller brought along."""
        return self.length - self._resumed_tokens

    @property
    def has_begun(self) -> bool:
        """Whether anything of it was told."""
        return bool(self.new_tokens or self.has_rest or self.ended)

    @property
    def is_over(self) -> bool:
        """Whether no token and no text can follow."""
        return self.has_rest or self.ended is not None

    def add(self, delta: pb.Delta) -> None:
        """Its next delta was told. Bytes that are no whole id are left out: nobody can go on from them."""
        new = tokens.count(delta.token_ids)
        self._ids.append(delta.token_ids[: new * tokens.TOKEN_BYTES])
        self._texts.append(delta.text)
        self.length += new
        # Tokens may come without text that is certain, text without a token only where none follows.
        self.has_rest = self.has_rest or bool(delta.text and not delta.token_ids)


class AnswerRecord:
    """All that was told of a call's answers. ``told`` and ``told_message`` while the first attempt runs; then, for each further one,
    ``interrupted``, ``resume``, and ``continued`` for everything that it says."""

    def __init__(
        self, branches: int = 1, resumed: Sequence[bytes] = (), lived: LivedTimes | None = None
    ) -> None:
        """``branches`` and ``resumed`` (packed, by branch) are what the caller asked; an answer of several attempts tells of the times in
        ``lived``, which its owner fills in, or of the last attempt's alone."""
        self._branches = [
            ToldBranch(packed)
            for packed in itertools.islice(itertools.chain(resumed, itertools.repeat(b"")), branches)
        ]
        self._resumed_tokens = sum(branch.length for branch in self._branches)
        self._lived = lived
        self._frames: list[bytes] = []
        self._gap = ""
        self._has_news = False
        self._started: pb.Started | None = None
        self.interruptions = 0
        """How often the answer broke off after its beginning and went on."""

    def __repr__(self) -> str:
        told = sum(branch.new_tokens for branch in self.branches)
        return f"<AnswerRecord {told} tokens in {len(self._branches)} branches, {self.interruptions} interruptions>"

    def told(self, frame: bytes) -> None:
        """A message was passed on, as its bytes. O(1): it is parsed when somebody asks."""
        self._frames.append(frame)

    def told_message(self, message: pb.GenerateResponse) -> None:
        """A message was passed on. O(its size); it is not kept."""
        match message.WhichOneof("event"):
            case "started":
                self._started = self._started or _copy_of(message.started)
            case "delta":
                self._note_delta(message.delta)
            case "branch_ended":
                branch = self._branch(message.branch_ended.branch)
                if branch is not None:
                    branch.ended = _copy_of_end(message.branch_ended)
                    self._has_news = True
            case _:
                pass  # the end, after which nobody asks; or an event that this version knows nothing of

    @property
    def branches(self) -> Sequence[ToldBranch]:
        """By branch. O(bytes that were told and not read before)."""
        self._read()
        return self._branches

    @property
    def started(self) -> pb.Started | None:
        """As it was told; None before. Not to be changed. Cost as of ``branches``."""
        self._read()
        return self._started

    @property
    def has_token(self) -> bool:
        """Whether anything of an answer was told, so that it cannot begin anew. Cost as of ``branches``."""
        return any(branch.has_begun for branch in self.branches)

    @property
    def is_whole(self) -> bool:
        """Whether all was told but Finished, and ``whole_end`` can say the rest. Only of several branches: of one, Finished tells
        how it ended. Cost as of ``branches``."""
        return bool(self.started) and all(branch.ended is not None for branch in self.branches)

    def interrupted(self) -> None:
        """The attempt has failed, and another will be made. Counts where the caller was told something since the last time."""
        self._read()
        self.interruptions += self._has_news
        self._has_news = False

    def resume(self, request: pb.GenerateRequest) -> None:
        """Change the caller's ``request`` into one that goes on from what was told, with the seed that was told, and is not given up for
        waiting, since it was admitted once. O(tokens told).

        Raises UnavailableError when what was told has a gap, which nobody can go on from.
        """
        branches = self.branches
        if self._gap:
            raise UnavailableError(f"the answer cannot be gone on with: {self._gap}")
        if self._started is not None:
            request.sampling.seed = self._started.seed
            request.queue_timeout_ms = 0
        if len(branches) == 1:
            request.resumed_output = branches[0].packed
            return
        del request.resumed_branches[:]
        if any(branch.length for branch in branches):
            request.resumed_branches.extend(branch.packed for branch in branches)

    def continued(
        self, response: pb.GenerateResponse, now_s: float | None = None
    ) -> pb.GenerateResponse | None:
        """A later attempt's message as the caller is told it, and noted as told; None where there is nothing to tell. O(its size).

        The same message, changed; ``now_s`` is when it came, by the clock of ``lived``. Raises UnavailableError when it does not go on where
        the answer was interrupted (the worker is one that knows nothing of ``resumed_branches``), or with other weights of the adapter.
        """
        match response.WhichOneof("event"):
            case "started":
                if self.started is not None:
                    self._check_weights(response.started)
                    return None
            case "delta":
                if not self._is_news(response.delta):
                    return None
            case "branch_ended":
                branch = self._branch(response.branch_ended.branch)
                if branch is None or branch.ended is not None:
                    return None
                response.branch_ended.completion_tokens = branch.new_tokens
            case "finished":
                self._complete(response.finished, now_s)
            case _:
                pass  # an event that this version knows nothing of
        self.told_message(response)
        return response

    def whole_end(self, now_s: float | None = None) -> pb.GenerateResponse:
        """The Finished of an answer that ``is_whole``: no other attempt is needed."""
        assert self.is_whole, "there is more to be told"
        finished = pb.Finished()
        self._complete(finished, now_s)
        return pb.GenerateResponse(finished=finished)

    def _is_news(self, delta: pb.Delta) -> bool:
        """Whether a later attempt's delta is to be told."""
        self._read()
        branch = self._branch(delta.branch)
        if branch is None:
            raise UnavailableError(
                f"the answer cannot be gone on with: branch {delta.branch} was never asked for"
            )
        if branch.is_over:
            # Its end was told. The attempt computes it once more, and on other hardware it might even end later.
            return False
        if delta.position != branch.length:
            raise UnavailableError(
                f"the answer cannot be gone on with: token {branch.length} of branch {delta.branch} is next, and the worker sent "
                f"{delta.position}; it may be of a version that cannot resume several branches"
            )
        return True

    def _check_weights(self, started: pb.Started) -> None:
        told = self._started
        if told is not None and self.has_token and told.adapter_digest != started.adapter_digest:
            raise UnavailableError("the answer cannot be gone on with: its adapter was loaded anew meanwhile")

    def _complete(self, finished: pb.Finished, now_s: float | None) -> None:
        """Make a later attempt's end the end of all attempts together."""
        usage, started, branches = finished.usage, self.started, self.branches
        if started is not None:
            usage.prompt_tokens = started.prompt_tokens
            usage.cached_tokens.CopyFrom(started.cached_tokens)
        usage.completion_tokens = sum(branch.new_tokens for branch in branches)
        usage.resumed_tokens = self._resumed_tokens
        # A proxy has counted its own, and what a worker says it has must not be more than the field holds.
        usage.interruptions = min(max(0, usage.interruptions), MAX_COUNTED) + self.interruptions
        if self.interruptions:
            # It is about what the last worker found, and the caller is told of what the first one did.
            usage.ClearField("prefill_saved")
        if branches[0].ended is not None:
            finished.reason = branches[0].ended.reason
        if self._lived is not None and now_s is not None:
            finished.timings.CopyFrom(self._lived.timings(now_s))

    def _read(self) -> None:
        frames, self._frames = self._frames, []
        for frame in frames:
            try:
                self.told_message(pb.GenerateResponse.FromString(frame))
            except DecodeError:  # passed on unread, and no message
                self._gap = self._gap or "something was told that cannot be read"

    def _note_delta(self, delta: pb.Delta) -> None:
        branch = self._branch(delta.branch)
        if branch is None or delta.position != branch.length:
            due = "no such branch" if branch is None else f"{branch.length} was due"
            self._gap = self._gap or f"token {delta.position} of branch {delta.branch} was told, and {due}"
        if branch is not None:
            branch.add(delta)
            self._has_news = True

    def _branch(self, number: int) -> ToldBranch | None:
        return self._branches[number] if 0 <= number < len(self._branches) else None


def _copy_of(started: pb.Started) -> pb.Started:
    copy = pb.Started()
    copy.CopyFrom(started)
    return copy


def _copy_of_end(ended: pb.BranchEnded) -> pb.BranchEnded:
    copy = pb.BranchEnded()
    copy.CopyFrom(ended)
    return copy
