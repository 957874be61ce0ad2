from __future__ import annotations

import pytest

from gateway.stored import parse_stored_call


@pytest.mark.parametrize(
    ("method", "path", "query", "upstream"),
    [
        ("GET", "/v1/responses/resp_1", b"", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1", b"", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel", b"", "/v1/responses/resp_1/cancel"),
        ("GET", "/v1/responses/resp_1/input_items", b"limit=5", "/v1/responses/resp_1/input_items?limit=5"),
        ("GET", "/v1/responses/r-2", b"stream=true&starting_after=7", "/v1/responses/r-2?stream=true&starting_after=7"),
    ],
)
def test_what_is_a_call_for_a_response(method: str, path: str, query: bytes, upstream: str) -> None:
    call = parse_stored_call(method, path, query)

    assert call is not None
    request = call.request("m")
    assert (request.method, request.path, request.model) == (method, upstream, "m")
    assert request.stream == (b"stream=true" in query)


@pytest.mark.parametrize(
    ("method", "path", "query"),
    [
        ("GET", "/v1/responses", b""),
        ("GET", "/v1/responses/", b""),
        ("GET", "/v1/responses/a/b", b""),
        ("GET", "/v1/responses/../models", b""),
        ("GET", "/v1/responses/a\n", b""),
        ("GET", "/v1/responses/é", b""),
        ("GET", "/v1/responses/" + "a" * 129, b""),
        ("GET", "/v1/responses/a", b"x=\r\n"),
        ("GET", "/v1/responses/a", b"x" * 1025),
        ("GET", "/v1/responses/a", b"x=y#z"),
        ("PUT", "/v1/responses/a", b""),
        ("GET", "/v1/responses/a/cancel", b""),
        ("POST", "/v1/responses/a", b""),
        ("GET", "/v1/responsesx/a", b""),
    ],
)
def test_what_is_none(method: str, path: str, query: bytes) -> None:
    assert parse_stored_call(method, path, query) is None
