"""What the processes of one gateway tell each other, and its encoding.

Times are monotonic seconds, which all processes of a machine share. A reservation is known by its process and its number
there; numbers are given in order and never again.
"""

from __future__ import annotations

import msgspec

from router import BlockName, Outcome

__all__ = [
    "Answered",
    "Batch",
    "Begun",
    "Busy",
    "Crashed",
    "Finished",
    "HomeMade",
    "Message",
    "OpenNumbers",
    "decode_batch",
    "encode_batch",
    "size_of",
]


class _Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


class Begun(_Message, frozen=True, tag=1):
    """A prompt is sent to a replica."""

    number: int
    request_id: str
    """As the replica knows it, and names it in its load frames."""
    replica_id: str
    at: float
    prompt_tokens: int
    matched_tokens: int
    num_bytes: int
    streamed: bool
    yields: bool
    names: list[BlockName]
    """Of its blocks, from the first one on; fewer than there are where they were too many to send."""


class Answered(_Message, frozen=True, tag=2):
    """Its first byte came."""

    number: int
    at: float


class Finished(_Message, frozen=True, tag=3):
    number: int
    at: float
    outcome: Outcome
    cached_tokens: int | None
    prompt_tokens: int | None


class Busy(_Message, frozen=True, tag=4):
    """A replica named a time until which it takes nothing."""

    replica_id: str
    until: float


class HomeMade(_Message, frozen=True, tag=5):
    """A replica made a response or conversation that its owner may come back for."""

    owner: str
    name: str
    replica_id: str
    model: str


class Crashed(_Message, frozen=True, tag=6):
    """A replica was lost while it answered this request."""

    fingerprint: bytes
    replica_id: str
    begun_at: float
    at: float


class OpenNumbers(_Message, frozen=True, tag=7):
    """Of the reservations with `low` <= number < `high`, only these are not finished."""

    low: int
    high: int
    numbers: list[int]


Message = Begun | Answered | Finished | Busy | HomeMade | Crashed | OpenNumbers


class Batch(msgspec.Struct, frozen=True, array_like=True):
    process: int
    messages: list[Message]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Batch)


def encode_batch(batch: Batch) -> bytes:
    return _encoder.encode(batch)


def decode_batch(data: bytes | memoryview) -> Batch:
    """Raises `msgspec.MsgspecError`."""
    return _decoder.decode(data)


def size_of(message: Message) -> int:
    """Not less than its encoding has bytes."""
    match message:
        case Begun():
            return 120 + 4 * (len(message.request_id) + len(message.replica_id)) + 9 * len(message.names)
        case HomeMade():
            return 40 + 4 * sum(map(len, (message.owner, message.name, message.replica_id, message.model)))
        case OpenNumbers():
            return 40 + 9 * len(message.numbers)
        case _:
            return 120
