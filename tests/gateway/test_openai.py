from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api_error import ApiError
from gateway.openai import ENDPOINTS, Body, Endpoint, parse_decoded, parse_request

CHAT: Endpoint = "/v1/chat/completions"
TEXT: Endpoint = "/v1/completions"


def test_splicing_keeps_every_byte_of_the_clients_fields() -> None:
    body = b' {"model": "m",  "messages":[{"role":"user","content":"h\\u00e9"}], "odd" : 1.50 }'
    request = parse_request(CHAT, body, open_access=False)

    sent = request.upstream_body({"warmpath": {"salt": "s"}})

    assert sent.endswith(body.strip()[1:])
    assert msgspec.json.decode(sent)["warmpath"] == {"salt": "s"}


def test_a_body_that_needs_nothing_is_sent_as_it_came() -> None:
    body = b'{"model":"m","prompt":"x"}'

    assert parse_request(TEXT, body, open_access=False).upstream_body({}) is body


@pytest.mark.parametrize("asked", [None, {}, {"include_usage": False}])
def test_usage_is_asked_for_once(asked: dict[str, bool] | None) -> None:
    fields: dict[str, object] = {"model": "m", "prompt": "x", "stream": True}
    if asked is not None:
        fields["stream_options"] = asked
    request = parse_request(TEXT, msgspec.json.encode(fields), open_access=False)

    sent = request.upstream_body({})

    assert not request.include_usage
    assert sent.count(b"stream_options") == 1
    assert msgspec.json.decode(sent)["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"", "invalid_json", None),
        (b"not json", "invalid_json", None),
        (b'{"model":"m"', "invalid_json", None),
        (b'{"model":"m","messages":[]} x', "invalid_json", None),
        (b'\xff\xfe{"model":"m"}', "invalid_json", None),
        (b"[]", "invalid_type", None),
        (b'{"messages":[]}', "invalid_type", "model"),
        (b'{"model":null,"messages":[]}', "invalid_type", "model"),
        (b'{"model":1,"messages":[]}', "invalid_type", "model"),
        (b'{"model":"m"}', "missing_required_parameter", "messages"),
        (b'{"model":"m","messages":"hi"}', "invalid_type", "messages"),
        (b'{"model":"m","messages":[],"stream":"yes"}', "invalid_type", "stream"),
        (b'{"model":"m","messages":[],"stream":1}', "invalid_type", "stream"),
        (b'{"model":"m","messages":[],"seed":1.5}', "invalid_type", "seed"),
        (b'{"model":"m","messages":[],"stream_options":{}}', "invalid_value", "stream_options"),
        (b'{"model":"m","messages":[],"chat_template":"{{ x }}"}', "unknown_parameter", "chat_template"),
        (b'{"model":"m","messages":[],"cache_salt":"mine"}', "unknown_parameter", "cache_salt"),
        (b'{"model":"m","messages":[],"warmpath":{}}', "unknown_parameter", "warmpath"),
    ],
)
def test_what_is_wrong_is_a_400_that_names_it(body: bytes, code: str, param: str | None) -> None:
    for parse in (parse_request, parse_decoded):
        with pytest.raises(ApiError) as caught:
            parse(CHAT, body, open_access=False)

        assert (caught.value.status, caught.value.code, caught.value.param) == (400, code, param)


@pytest.mark.parametrize("inside", [b'"\xff"', b"[" * 100_000 + b"]" * 100_000, b'"\\ud800"'])
def test_what_the_first_scan_skips_is_found_when_the_prompt_is_read(inside: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_request(CHAT, b'{"model":"m","messages":[' + inside + b"]}", open_access=False).fields()

    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


MESSAGES = b'[{"role":"user","content":"a"}, {"role":"user","content":"b"} , {"role":"user","content":"c"}]'
KNOWN = len(b'[{"role":"user","content":"a"}')
BEHIND = [{"role": "user", "content": "b"}, {"role": "user", "content": "c"}]


def fields_behind(body: bytes) -> dict[str, object] | None:
    return parse_request(CHAT, body, open_access=False).fields_behind(MESSAGES, KNOWN)


@pytest.mark.parametrize(
    ("before", "behind"),
    [
        (b"", b""),
        (b'"x":{"y":[{"role":"user","content":"a"}]},', b""),
        (b"", b',"tools":[{"type":"function"}] '),
        (b'"x":"messages",', b', "y":1'),
    ],
)
def test_messages_known_from_another_request_are_not_decoded_again(before: bytes, behind: bytes) -> None:
    body = b'{"model":"m",' + before + b'"messages":' + MESSAGES + behind + b"}"

    fields = fields_behind(body)

    assert fields == msgspec.json.decode(body) | {"messages": BEHIND}


@pytest.mark.parametrize(
    "members",
    [
        b'"x":' + MESSAGES + b',"messages":' + MESSAGES,  # which of the two was cut?
        b'"messages":' + MESSAGES + b',"messages":' + MESSAGES,
        b'"messages":[],"messages":' + MESSAGES,
        b'"messages":' + MESSAGES + b',"x":{"y":1,"y":2}',
        b'"messages":' + MESSAGES + b',"x":"\xff"',
        b'"messages":' + MESSAGES + b',"x":"' + b"x" * 100_000 + b'"',
        b'"messages":[{"role":"user","content":"another"}]',
    ],
)
def test_in_doubt_all_messages_are_decoded(members: bytes) -> None:
    assert fields_behind(b'{"model":"m",' + members + b"}") is None


def test_an_open_gateway_passes_engine_fields_on_but_not_our_own() -> None:
    body = b'{"model":"m","messages":[],"cache_salt":"mine"}'

    assert parse_request(CHAT, body, open_access=True).body == body
    with pytest.raises(ApiError):
        parse_request(CHAT, b'{"model":"m","messages":[],"warmpath":{}}', open_access=True)


_MEMBERS = st.dictionaries(
    st.sampled_from([*(each.name for each in msgspec.structs.fields(Body)), "other"]),
    st.sampled_from(
        [
            *("null", "true", "false", "0", "-1", "1", '"16"', "1.5", "1e9", "9007199254740993", "1" + "0" * 30, "-0"),
            *('"x"', '""', "[]", "[1,2]", "[[1]]", '["a","b"]', "{}", '{"id":"r"}', '{"id":1}'),
            *('{"include_usage":true}', '{"include_usage":1}', '[{"role":"user","content":[1,2]}]', "NaN", '"\\ud800"'),
        ]
    ),
    max_size=5,
)


@given(st.sampled_from(sorted(ENDPOINTS)), _MEMBERS, st.booleans(), st.booleans())
def test_a_body_is_the_same_request_whether_it_is_decoded_at_once_or_when_it_is_needed(
    endpoint: Endpoint, members: dict[str, str], is_open: bool, has_space: bool
) -> None:
    """Of two faults each may name another one first."""
    given_members = {"model": '"m"', **members}
    body = (
        " " * has_space + "{" + ",".join(f'"{name}":{value}' for name, value in given_members.items()) + "}"
    ).encode()
    try:
        request = parse_request(endpoint, body, open_access=is_open)
        fields = request.fields()
    except ApiError:
        with pytest.raises(ApiError):
            parse_decoded(endpoint, body, open_access=is_open)
        return

    decoded_request, decoded = parse_decoded(endpoint, body, open_access=is_open)

    assert (repr(decoded), msgspec.structs.replace(decoded_request, messages=request.messages)) == (
        repr(fields),
        request,
    )


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_no_body_raises_anything_but_an_api_error(body: bytes) -> None:
    for parse in (parse_request, parse_decoded):
        with contextlib.suppress(ApiError):
            parse(CHAT, body, open_access=False)
