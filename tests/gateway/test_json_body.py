"""What passes as JSON: against Python's own reader, which can be told to find repeated names."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api_error import ApiError
from gateway.json_body import MAX_DEPTH, MAX_INTEGER, MAX_VALUES, decode_object

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


def nested(depth: int) -> bytes:
    """An object with that many containers in one another."""
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def refusal(body: bytes) -> str:
    with pytest.raises(ApiError) as caught:
        decode_object(body)
    assert caught.value.status == 400
    assert len(caught.value.message) < 300, "what a client sent is not sent back to it"
    return caught.value.code


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":-Infinity}',
        b'{"a":1e999}',
        b'{"a":[-1e400]}',
        b'{"a":%d}' % (MAX_INTEGER + 1),
        b'{"a":{"b":[-%d]}}' % (MAX_INTEGER + 1),
        b'{"a":1%b}' % (b"0" * 5000),
        b'{"a":"\xff"}',
        b'{"\xff":1}',
        b'{"a":"\\ud800"}',
        b'{"a":"\xed\xa0\x80"}',
        b'\xef\xbb\xbf{"a":1}',
        '{"a":1}'.encode("utf-16"),
        b'{"a":1} x',
        b'{"a":1}{}',
        b'{"a":1,}',
        b'{"a":01}',
        b'{"a":"\n"}',
        b"{'a':1}",
        b'{"a":1',
        nested(MAX_DEPTH + 1),
        nested(150),
        nested(100_000),
        b'{"a":' + b'{"b":' * 70 + b"1" + b"}" * 71,
    ],
)
def test_what_readers_disagree_about_is_refused(body: bytes) -> None:
    assert refusal(body) == "invalid_json"


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":1,"a":1}',
        b'{"a":1,"b":2,"\\u0061":3}',
        b'{"x":[{"y":{"a":1 , "a" : 2}}]}',
        b'{"seed":1,"seed":2}',
        b'{"%b":1,"%b":2}' % (b"k" * 100_000, b"k" * 100_000),
    ],
)
def test_a_repeated_name_is_refused_wherever_it_stands(body: bytes) -> None:
    assert refusal(body) == "duplicate_key"


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b' \t\r\n{"a" : 1.5e3 } \n',
        b'{"a":%d}' % MAX_INTEGER,
        b'{"a":-%d}' % MAX_INTEGER,
        b'{"a":"\\ud83d\\ude00\\u0000"}',
        b'{"a":{"b":1},"c":{"b":1}}',
        nested(MAX_DEPTH),
    ],
)
def test_the_rest_passes_as_it_is(body: bytes) -> None:
    assert decode_object(body) == json.loads(body)


def test_a_seed_may_have_64_bits() -> None:
    assert decode_object(b'{"seed":%d}' % (2**64 - 1)) == {"seed": 2**64 - 1}


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=4), st.booleans())
def test_every_object_of_small_values_passes_and_every_other_is_refused(fields: dict[str, Any], escaped: bool) -> None:
    body = json.dumps(fields, ensure_ascii=escaped).encode("utf-8", "surrogatepass")

    if is_plain({**fields, "seed": 0}):
        assert decode_object(body) == fields
    else:
        refusal(body)


def is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(is_plain(name) and is_plain(inner) for name, inner in value.items())
    if isinstance(value, list):
        return all(map(is_plain, value))
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, str):
        return not any("\ud800" <= character <= "\udfff" for character in value)
    return not isinstance(value, int) or abs(value) <= MAX_INTEGER


@pytest.mark.parametrize("item", [b"0", b"[]", b"{}", b'""', b'"\\\\\\"],[{"', b'{"a":0}', b"0 "])
def test_values_are_counted_before_they_are_made(item: bytes) -> None:
    fits = (MAX_VALUES - 10) // 3
    decode_object(b'{"a":[' + b",".join([item] * fits) + b"]}")

    began = time.thread_time()
    assert refusal(b'{"a":[' + b",".join([item] * (MAX_VALUES * 2)) + b"]}") == "invalid_json"
    assert time.thread_time() - began < 0.1


@given(st.text(alphabet='\\"[{,:ab', max_size=60), st.integers(0, 40))
def test_what_stands_in_a_string_is_no_value_wherever_it_is_cut(text: str, padding: int) -> None:
    """Many commas and brackets in one long string, with the escapes of every kind at every place of the slices' ends."""
    long = "," * padding + (text + ",,") * 70_000 if len(text) < 3 else "," * padding + (text + ",") * 10_000
    body = json.dumps({"a": long}).encode()

    assert decode_object(body) == {"a": long}
