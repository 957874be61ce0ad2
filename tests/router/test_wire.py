from array import array
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.wire import (
    MAX_FRAME_BYTES,
    Batch,
    Frame,
    FrameDecoder,
    FrameError,
    Hello,
    Load,
    PromptField,
    ReplicaSpec,
    Stored,
    decode_ids,
    encode_frame,
    encode_ids,
    pack_ids,
    unpack_ids,
)

u64 = st.integers(0, 2**64 - 1)
u32 = st.integers(0, 2**32 - 1)
seconds = st.floats(0, 1e12)
names = st.lists(u64, max_size=5)

hellos = st.builds(
    Hello,
    epoch=st.text(max_size=8),
    seq=u64,
    model=st.text(max_size=8),
    block_size=u32,
    tokenizer_digest=st.text(max_size=8),
    numerics=st.text(max_size=8),
    capacity_blocks=u32,
    max_num_seqs=u32,
    started_at=seconds,
)
batches = st.builds(
    Batch,
    seq=u64,
    ts=seconds,
    stored=st.lists(st.builds(Stored, parent=u64, names=names), max_size=3),
    removed=names,
    cleared=st.booleans(),
)
loads = st.builds(
    Load,
    seq=u64,
    ts=seconds,
    waiting=u32,
    waiting_uncached_tokens=u32,
    running=u32,
    kv_used_blocks=u32,
    prefill_tok_s=seconds,
    step_ms=seconds,
    admitted=st.lists(st.text(max_size=8), max_size=3),
)
frames = hellos | batches | loads


def decode(chunks: Sequence[bytes]) -> list[Frame]:
    decoder = FrameDecoder()
    return [frame for chunk in chunks for frame in decoder.feed(chunk)]


@given(st.lists(frames, max_size=4), st.data())
def test_frames_survive_any_split_of_their_bytes(sent: list[Frame], data: st.DataObject) -> None:
    stream = b"".join(map(encode_frame, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    chunks = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]

    assert decode(chunks) == sent
    assert decode([stream[at : at + 1] for at in range(len(stream))]) == sent


def test_a_partial_frame_waits_for_its_rest() -> None:
    frame = Batch(seq=1, ts=0.0, removed=[1, 2])
    encoded = encode_frame(frame)
    decoder = FrameDecoder()

    assert list(decoder.feed(encoded[:-1])) == []
    assert list(decoder.feed(encoded[-1:])) == [frame]


def test_frames_before_a_broken_one_are_still_given() -> None:
    frame = Batch(seq=1, ts=0.0)
    decoder = FrameDecoder()
    frames = decoder.feed(encode_frame(frame) + b"\0\0\0\1\xc1")

    assert next(frames) == frame
    with pytest.raises(FrameError):
        next(frames)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\xc0",
        msgspec.msgpack.encode({"type": "unknown"}),
        msgspec.msgpack.encode({"type": "batch", "seq": "1", "ts": 0.0}),
        msgspec.msgpack.encode({"type": "batch", "ts": 0.0}),
        encode_frame(Batch(seq=1, ts=0.0))[4:] + b"\0",
    ],
)
def test_what_is_no_frame_is_refused(payload: bytes) -> None:
    with pytest.raises(FrameError):
        decode([len(payload).to_bytes(4, "big") + payload])


@given(st.binary(max_size=200))
def test_noise_is_refused_or_waited_for_but_never_raises_anything_else(noise: bytes) -> None:
    with suppress(FrameError):
        decode([noise])


def test_a_frame_over_the_limit_is_refused_before_it_is_buffered_and_never_sent() -> None:
    with pytest.raises(FrameError):
        decode([(MAX_FRAME_BYTES + 1).to_bytes(4, "big")])
    with pytest.raises(FrameError):
        encode_frame(Batch(seq=1, ts=0.0, removed=[2**63] * (MAX_FRAME_BYTES // 9 + 1)))


def test_fields_of_a_later_version_are_ignored_in_frames() -> None:
    payload = msgspec.msgpack.encode({"type": "batch", "seq": 3, "ts": 0.0, "later": 1})

    assert decode([len(payload).to_bytes(4, "big") + payload]) == [Batch(seq=3, ts=0.0)]


def test_unknown_fields_are_refused_where_people_write_them() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"url": "http://h", "model": "m", "weigth": 2}', type=ReplicaSpec)


def test_the_prompt_field_carries_only_what_differs_from_the_default() -> None:
    assert msgspec.json.encode(PromptField(salt="s")) == b'{"salt":"s"}'


@given(st.lists(u32, max_size=50))
def test_ids_survive_packing_and_the_text_form(ids: list[int]) -> None:
    packed = pack_ids(ids)

    assert packed == b"".join(token.to_bytes(4, "little") for token in ids)
    assert decode_ids(encode_ids(packed)) == packed
    assert unpack_ids(packed) == array("I", ids)


@pytest.mark.parametrize("text", ["AAA=", "AAAAAAA=", "not base64!", "AAAA AAAA"])
def test_text_that_holds_no_ids_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decode_ids(text)
