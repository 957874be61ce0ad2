import json

import msgspec
import pytest

from workers.api_error import ApiError, decode_json


def test_an_error_has_openais_shape() -> None:
    error = json.loads(ApiError(404, "model_not_found", "no such model", param="model").body())

    assert error == {
        "error": {"message": "no such model", "type": "not_found_error", "param": "model", "code": "model_not_found"}
    }


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (413, "invalid_request_error"),
        (500, "server_error"),
        (503, "server_error"),
    ],
)
def test_the_type_follows_from_the_status(status: int, kind: str) -> None:
    assert json.loads(ApiError(status, "code", "text").body())["error"]["type"] == kind


class _Inner(msgspec.Struct):
    size: int


class _Outer(msgspec.Struct):
    items: list[_Inner]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"items":[{"size":1},{"size":"x"}]}', "items[1].size"),
        (b'{"items":[{}]}', "items[0].size"),
        (b"{}", "items"),
        (b"[]", None),
    ],
)
def test_the_place_of_a_wrong_value_is_named(body: bytes, param: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        decode_json(msgspec.json.Decoder(_Outer), body)

    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_value_within_a_body_is_named_with_its_field() -> None:
    with pytest.raises(ApiError) as caught:
        decode_json(msgspec.json.Decoder(list[int]), b'[1,"x"]', root="prompt")

    assert caught.value.param == "prompt[1]"
