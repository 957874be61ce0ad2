"""The event stream of an answer, as bytes: what the relay must know of it without decoding it.

A replica's events go to the client byte for byte. Looking at them answers four questions: has the answer begun, did it
finish, was its end marker sent, and what did it use. Only whole events come out, so that a comment or an error event can be
put between any two outputs.

Nearly every event of a completion carries ``"finish_reason":null``, and in JSON those bytes are a key and nothing else: inside
a string the quotes would be escaped. Such an event is *plain*: not the end marker, not the usage chunk, not an error, and it
passes unread. Everything else is parsed, which also makes sure that nothing but completion chunks is relayed.

Lines end in LF or CRLF. A lone CR, legal in SSE, is taken for text: no server sends it, and JSON never holds one raw.

What must hold: outputs and verdicts do not depend on how the bytes were split; at most one partial event is held.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import ClassVar, Final

import msgspec

from gateway.api_error import error_body
from gateway.openai import Usage, usage_of
from gateway.upstream.contract import ProtocolViolation, ReplicaError, UpstreamError

__all__ = ["MAX_EVENT_BYTES", "EventRelay", "SseRelay", "data_of", "error_event"]

MAX_EVENT_BYTES: Final = 1 << 20
"""A replica is untrusted input, and an event waits in memory for its end. Real ones are below 100 KB (logprobs)."""

_EVENT_END: Final = re.compile(rb"\n\r?\n")


_NULL: Final = msgspec.Raw(b"null")


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: msgspec.Raw = _NULL
    error: msgspec.Raw = _NULL


_chunk_decoder = msgspec.json.Decoder(_Chunk)


def error_event(message: str, *, code: str, type_: str = "server_error") -> bytes:
    """How a stream that has begun ends when it fails: nothing follows it, ``[DONE]`` least of all."""
    return b"data: " + error_body(message, type_=type_, code=code) + b"\n\n"


class EventRelay(ABC):
    """One stream of events from replica to client, of whatever dialect: how they are cut out of the bytes, and how it ends.

    Kept from the client: what a dialect keeps from it; a fault, which is raised instead; whatever follows the end.
    """

    __slots__ = ("_failure", "_partial", "done", "events", "finish_reasons", "usage")

    max_event_bytes: ClassVar[int] = MAX_EVENT_BYTES

    def __init__(self) -> None:
        self._partial = bytearray()
        self._failure: UpstreamError | None = None
        self.events = 0
        """Events so far that carry a part of the answer. The first one commits the answer and is its time to first token."""
        self.done = False
        """Whether the stream came to its good end."""
        self.finish_reasons: list[str] = []
        """Why the choices ended, in the order of their ends."""
        self.usage: Usage | None = None
        """The newest usage object seen; that of the whole answer once `done`."""

    @staticmethod
    @abstractmethod
    def is_plain(event: bytes) -> bool:
        """Whether a whole event carries a part of the answer and nothing that must be read."""

    @abstractmethod
    def read(self, event: bytes) -> bool:
        """Note what an event says that is not plain; whether it goes to the client. Raises `UpstreamError`."""

    @abstractmethod
    def error_event(self, message: str, *, code: str) -> bytes:
        """How the stream ends for the client when it fails: nothing follows it."""

    def count_plain(self) -> None:
        """A plain event passes."""
        self.events += 1

    def feed(self, chunk: bytes) -> bytes:
        """Bytes from the replica → bytes for the client, b'' when no event is complete.

        Raises `ReplicaError` or `ProtocolViolation` once all that came before the fault has been returned.
        """
        # The usual case is one event a chunk, a plain one: four scans (bytes.find, since `in` costs twice as much) and no copy.
        if (
            0 <= chunk.find(b"\n\n") == len(chunk) - 2
            and not self._partial
            and chunk.find(b"\r") < 0
            and not self.done
            and self._failure is None
        ):
            if not self.is_plain(chunk):
                return self._feed_event(chunk)
            self.count_plain()
            return chunk
        return self._feed_events(chunk)

    def flush(self) -> bytes:
        """When the replica's body is over: a last event that only lacks its blank line. One that was cut is a violation."""
        if self._failure is not None:
            raise self._failure
        tail = bytes(self._partial)
        self._partial.clear()
        if not data_of(tail):
            return b""
        event = tail + (b"\n" if tail.endswith(b"\n") else b"\n\n")
        return event if self.read(event) else b""  # read even if it looks plain: it may be cut

    def _feed_event(self, event: bytes) -> bytes:
        """A whole one that is not plain."""
        try:
            if len(event) > self.max_event_bytes:
                raise self._too_long()
            return event if self.read(event) else b""
        except UpstreamError as error:
            return self._fail(error, [])

    def _feed_events(self, chunk: bytes) -> bytes:
        if self._failure is not None:
            raise self._failure
        data = self._with_partial(chunk)
        forward: list[bytes] = []
        start = 0
        for end in _EVENT_END.finditer(data):
            if self.done:
                return b"".join(forward)
            event = data[start : end.end()]
            start = end.end()
            try:
                if self._take(event):
                    forward.append(event)
            except UpstreamError as error:
                return self._fail(error, forward)
        if not self.done:
            self._partial += data[start:]
            if len(self._partial) > self.max_event_bytes:
                return self._fail(self._too_long(), forward)
        return b"".join(forward)

    def _with_partial(self, chunk: bytes) -> bytes:
        """The partial event and `chunk`, b'' as long as they make no whole event. Scans no byte twice."""
        partial = self._partial
        if not partial:
            return chunk
        scanned = max(len(partial) - 2, 0)  # the end of an event may have begun in the partial one
        partial += chunk
        if _EVENT_END.search(partial, scanned) is None:
            return b""
        data = bytes(partial)
        partial.clear()
        return data

    def _fail(self, error: UpstreamError, forward: list[bytes]) -> bytes:
        self._failure = error
        if not forward:
            raise error
        return b"".join(forward)

    def _take(self, event: bytes) -> bool:
        """Note what the event says; whether it goes to the client."""
        if len(event) > self.max_event_bytes:
            raise self._too_long()
        if self.is_plain(event):
            self.count_plain()
            return True
        return self.read(event)

    def _too_long(self) -> ProtocolViolation:
        return ProtocolViolation(f"an event of the stream is longer than {self.max_event_bytes} bytes")


class SseRelay(EventRelay):
    """A stream of completion chunks.

    Kept from the client: the usage chunk, if `strip_usage`; an error event of the replica and a ``[DONE]`` that no
    finish_reason preceded.
    """

    __slots__ = ("_strip_usage", "finished")

    def __init__(self, *, strip_usage: bool) -> None:
        """`strip_usage`: the gateway asked for the usage chunk, the client did not."""
        super().__init__()
        self._strip_usage = strip_usage
        self.finished = False
        """Whether a finish_reason was seen."""

    @staticmethod
    def is_plain(event: bytes) -> bool:
        """Whether every finish_reason in it, and there is one, is null; compact or with Python's default separators."""
        reasons = event.count(b'"finish_reason"')
        return reasons > 0 and (
            event.count(b'"finish_reason":null') == reasons or event.count(b'"finish_reason": null') == reasons
        )

    def read(self, event: bytes) -> bool:
        data = data_of(event)
        if not data:
            return True  # a comment, or fields that are not for us
        if data == b"[DONE]":
            if not self.finished:
                raise ProtocolViolation("the stream ended without a finish_reason")
            self.done = True
            return True
        chunk = _decode(data)
        has_usage = bytes(chunk.usage) != b"null"
        if has_usage:
            self.usage = usage_of(chunk.usage)
        if not chunk.choices:
            return not (has_usage and self._strip_usage)
        reasons = [choice.finish_reason for choice in chunk.choices if choice.finish_reason is not None]
        if reasons:
            self.finished = True
            self.finish_reasons += reasons
        self.events += 1
        return True

    def error_event(self, message: str, *, code: str) -> bytes:
        return error_event(message, code=code)


def data_of(event: bytes) -> bytes:
    """The event's data, b'' if it has none. White space around it means nothing in JSON and is left out."""
    if event.startswith(b"data:") and event.find(b"\n") == len(event) - 2 and event.endswith(b"\n"):
        return event[5:].strip()  # one line, as nearly always
    return b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))


def _decode(data: bytes) -> _Chunk:
    try:
        chunk = _chunk_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolViolation("an event of the stream is no completion chunk") from error
    if bytes(chunk.error) != b"null":
        raise ReplicaError(data)
    if chunk.choices is None:
        raise ProtocolViolation("an event of the stream is no completion chunk")
    return chunk
