"""Values that cross a process boundary, each next to its encoding.

A worker publishes what its prefix cache holds as *frames* (`Hello`, `Batch`, `Load`) over one long HTTP response, and the
gateway sends a worker what it already knows about a prompt as the body field ``warmpath`` (`PromptField`). Both sides
import this module, so they cannot drift apart.

Frames carry block names only, never token ids: ids are the prompt.

What must hold: `seq` counts batches of one epoch from 1 without a hole; a `Load` carries the seq of the last batch before
it, so a lost batch shows within a second. A new epoch means the replica lost everything it held.
"""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

__all__ = [
    "HASH_SCHEME",
    "MAX_FRAME_BYTES",
    "MAX_FRAME_NAMES",
    "Batch",
    "Frame",
    "FrameDecoder",
    "FrameError",
    "Hello",
    "Load",
    "PromptField",
    "ReplicaSpec",
    "Resume",
    "Stored",
    "decode_ids",
    "encode_frame",
    "encode_ids",
    "pack_ids",
    "unpack_ids",
]

HASH_SCHEME: Final = "xxh3-64/1"
"""Name and version of the block naming scheme (`router.blocks`); replica and gateway must agree on it."""

MAX_FRAME_BYTES: Final = 256 << 10
"""A replica is untrusted input: a longer frame ends the stream. A snapshot is cut into batches well below this."""
MAX_FRAME_NAMES: Final = 1 << 14
"""Names (of blocks and of requests) in a frame: what the index takes in within 10 ms. An engine step changes far fewer: so
many blocks are 262,144 tokens."""

_LENGTH_BYTES: Final = 4


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="hello"):
    """Who is speaking: the first frame of every event stream and snapshot."""

    v: int = 1
    epoch: str
    """Random per start of the replica."""
    seq: int
    """Seq of the last batch published when this stream was opened."""
    model: str
    revision: str = ""
    adapter: str = ""
    block_size: int
    hash: str = HASH_SCHEME
    tokenizer_digest: str
    numerics: str
    """Digest of all that decides the bits of an answer; equal numerics give equal text."""
    capacity_blocks: int
    max_num_seqs: int
    started_at: float
    """Unix time, seconds; for people."""


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """A run of blocks that are now cached, each the child of the one before."""

    parent: int
    """Name of the block before the first one; the root's name for a prompt's first block."""
    names: list[int]


class Batch(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="batch"):
    """What one engine step changed. Apply in the order cleared, removed, stored."""

    seq: int
    ts: float
    stored: list[Stored] = []
    removed: list[int] = []
    cleared: bool = False


class Load(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="load"):
    """How much work the replica has promised. On change, at most 20 a second, at least one: also the sign of life."""

    seq: int
    """Seq of the last batch published before this frame."""
    ts: float
    waiting: int
    """Requests that have not begun to prefill."""
    waiting_uncached_tokens: int
    """Prompt tokens still to be computed: of waiting requests and of the unfinished part of running prefills."""
    running: int
    kv_used_blocks: int
    """Blocks that running requests hold; the rest is free or cached."""
    prefill_tok_s: float
    """Measured prefill rate, tokens a second."""
    step_ms: float
    """Measured time of a decode step, milliseconds."""
    admitted: list[str] = []
    """Request ids that entered the engine since the last frame: from here on the counts above include them."""
    prompt_tokens_total: int = 0
    """Counters since the epoch began: prompt tokens of admitted requests, those served from the cache, tokens generated."""
    cached_tokens_total: int = 0
    generated_tokens_total: int = 0


Frame = Hello | Batch | Load

_frame_encoder = msgspec.msgpack.Encoder()
_frame_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


class FrameError(ValueError):
    """The bytes are no frame stream; the connection is of no further use."""


def encode_frame(frame: Frame) -> bytes:
    """One frame as u32be length + msgpack."""
    payload = _frame_encoder.encode(frame)
    if len(payload) > MAX_FRAME_BYTES:
        raise FrameError(f"frame of {len(payload)} bytes is longer than {MAX_FRAME_BYTES}")
    return len(payload).to_bytes(_LENGTH_BYTES, "big") + payload


class FrameDecoder:
    """Bytes in any split → frames. Holds at most one partial frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield every frame that `data` completes; raise `FrameError` at the first that is none."""
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= _LENGTH_BYTES:
                length = int.from_bytes(buffer[start : start + _LENGTH_BYTES], "big")
                if length > MAX_FRAME_BYTES:
                    raise FrameError(f"frame of {length} bytes is longer than {MAX_FRAME_BYTES}")
                end = start + _LENGTH_BYTES + length
                if len(buffer) < end:
                    break
                payload = bytes(buffer[start + _LENGTH_BYTES : end])
                start = end
                yield _decode(payload)
        finally:
            del buffer[:start]


def _decode(payload: bytes) -> Frame:
    try:
        frame = _frame_decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(str(error)) from error
    if (count := _num_names(frame)) > MAX_FRAME_NAMES:
        raise FrameError(f"frame of {count} names is longer than {MAX_FRAME_NAMES}")
    return frame


def _num_names(frame: Frame) -> int:
    if isinstance(frame, Batch):
        return len(frame.removed) + len(frame.stored) + sum([len(run.names) for run in frame.stored])
    return len(frame.admitted) if isinstance(frame, Load) else 0


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a replica says of itself when it registers: the body of ``PUT /admin/v1/replicas/{id}``."""

    url: str
    model: str
    revision: str = ""
    kind: str = "warmpath"
    """``warmpath`` (events, tokenizer, ids accepted) or ``openai`` (only /v1/*)."""
    epoch: str = ""
    credential: str = ""
    """What the gateway shows the replica as its bearer token."""
    priority: bool = False
    """Of kind ``openai``: whether it computes prompts in the order of the body's field ``priority``, the least first, as vLLM
    does with ``--scheduling-policy priority``. Own workers are told more (`PromptField`)."""
    lease_s: float = 15.0


class Resume(msgspec.Struct, frozen=True, kw_only=True):
    """A stream that broke elsewhere, to be continued as if it had not."""

    ids: str
    """base64 of the u32le ids that its events told; '' when none did."""
    response_id: str
    """The ``id`` and ``created`` of its chunks."""
    created: int


class PromptField(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body field ``warmpath``: what the gateway already knows, so that the worker computes nothing twice.

    Accepted only together with the replica credential.
    """

    prompt_ids: str = ""
    """base64 of u32le token ids; '' when the worker shall render and tokenize (several prompts in one body)."""
    escape: bool = False
    """Whether special tokens in the texts of messages are text, should the worker render them (`router.escape`)."""
    salt: str = ""
    seed: int | None = None
    request_id: str = ""
    priority: int = 0
    patience: float = 0.0
    """Its place among those of its priority: when it came plus so many times what its uncached tokens take at the replica's
    prefill rate. So it lets those shorter ones pass that come so soon after it; 0 is first come, first served."""
    resume: Resume | None = None

    def encode(self, prompt_ids: bytes) -> bytes:
        """As JSON, with ids that are text already: a megabyte of base64 need not be looked at for what to escape."""
        assert not self.prompt_ids
        rest = msgspec.json.encode(self)
        if not prompt_ids:
            return rest
        return b'{"prompt_ids":"%b"%b%b' % (prompt_ids, b"" if rest == b"{}" else b",", rest[1:])


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids → u32le bytes, the form that is hashed and sent."""
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> array[int]:
    """u32le bytes → token ids. Raises ValueError when the length is no multiple of 4."""
    ids = array("I")
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def encode_ids(packed: bytes) -> str:
    """u32le bytes → the text form inside `PromptField`."""
    return base64.b64encode(packed).decode("ascii")


def decode_ids(text: str) -> bytes:
    """The text form inside `PromptField` → u32le bytes. Raises ValueError on anything else."""
    packed = base64.b64decode(text, validate=True)
    if len(packed) % 4:
        raise ValueError("the ids are no whole number of u32")
    return packed
