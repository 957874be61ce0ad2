"""The event stream of ``/v1/responses``, as bytes. Its events have names, and its end is one of them: there is no ``[DONE]``.

Nearly every event is a delta whose name, in its first line, says all that the relay must know; it passes unread. Those that
open a stream carry nothing of the answer, so they are held with the status line: another replica may still give it.
"""

from __future__ import annotations

from typing import ClassVar, Final

import msgspec

from gateway.openai import Response
from gateway.sse import EventRelay, data_of
from gateway.upstream.contract import ProtocolViolation, ReplicaError

__all__ = ["ResponseRelay", "response_error_event"]

_NAME: Final = b"event: response."
_OPENING: Final = frozenset({"response.created", "response.queued", "response.in_progress"})
_ENDS: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})
_TOLD: Final = frozenset(b"event: " + name.encode() for name in _OPENING | _ENDS)
"""First lines of events that must be read."""


class _Event(msgspec.Struct):
    type: str = ""
    response: Response | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")


_decoder = msgspec.json.Decoder(_Event)


def response_error_event(message: str, *, code: str, sequence_number: int = 0) -> bytes:
    """How a stream that has begun ends when it fails."""
    data = {"type": "error", "code": code, "message": message, "param": None, "sequence_number": sequence_number}
    return b"event: error\ndata: " + msgspec.json.encode(data) + b"\n\n"


class ResponseRelay(EventRelay):
    """One Response from replica to client. Kept from the client: an error event of the replica."""

    __slots__ = ("_num_events", "response_id")

    max_event_bytes: ClassVar[int] = 8 << 20
    """The first event repeats the request's instructions and tools, the last one all of the answer."""

    def __init__(self) -> None:
        super().__init__()
        self._num_events = 0
        self.response_id = ""
        """'' until an event has told it; none that carries a part of the answer comes before."""

    @staticmethod
    def is_plain(event: bytes) -> bool:
        return event.startswith(_NAME) and event[: event.find(b"\n")].rstrip() not in _TOLD

    def count_plain(self) -> None:
        self.events += 1
        self._num_events += 1

    def read(self, event: bytes) -> bool:
        data = data_of(event)
        if not data:
            return True  # a comment
        told = _decode(data)
        if told.type == "error" or bytes(told.error) != b"null":
            raise ReplicaError(data)
        if told.response is not None and told.response.id:
            self.response_id = told.response.id
        self._num_events += 1
        if told.type in _OPENING:
            return True
        self.events += 1
        if told.type in _ENDS:
            self.done = True
            if told.response is not None:
                self.usage = told.response.usage or self.usage
        return True

    def error_event(self, message: str, *, code: str) -> bytes:
        return response_error_event(message, code=code, sequence_number=self._num_events)


def _decode(data: bytes) -> _Event:
    try:
        event = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolViolation("an event of the stream is none of a Response") from error
    if not event.type and bytes(event.error) == b"null":
        raise ProtocolViolation("an event of the stream is none of a Response")
    return event
