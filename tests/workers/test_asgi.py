import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from starlette.types import Message, Receive

import workers.asgi
from workers.api_error import ApiError
from workers.asgi import ClientGone, WhileConnected, read_json_body

JSON = [(b"content-type", b"application/json")]


def receiving(messages: Iterable[dict[str, Any]]) -> Receive:
    """What a client sends; after that it stays and says nothing."""
    left = list(messages)

    async def receive() -> Message:
        if left:
            return left.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    return receive


def body(data: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": data, "more_body": more}


GONE = {"type": "http.disconnect"}


async def test_a_body_comes_in_any_number_of_pieces() -> None:
    receive = receiving([body(b"{", more=True), body(b"", more=True), body(b"}")])

    assert await read_json_body({"headers": JSON}, receive) == b"{}"


async def test_a_client_that_leaves_within_its_body_is_gone() -> None:
    with pytest.raises(ClientGone):
        await read_json_body({"headers": JSON}, receiving([body(b"{", more=True), GONE]))


@pytest.mark.parametrize(
    "data", [b'{"unknown": "\xff"}', b'{"\xff": 1}', b'{"a": "\xed\xa0\x80"}', '{"a": 1}'.encode("utf-16")]
)
async def test_a_body_that_is_not_utf_8_is_refused_wherever_it_is_wrong(data: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        await read_json_body({"headers": JSON}, receiving([body(data[:11], more=True), body(data[11:])]))

    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


async def test_a_character_may_lie_across_two_pieces_of_a_body() -> None:
    data = '{"a": "日本"}'.encode()

    assert await read_json_body({"headers": JSON}, receiving([body(data[:9], more=True), body(data[9:])])) == data


async def test_a_body_too_large_is_refused_unread() -> None:
    headers = [*JSON, (b"content-length", b"999999999")]

    with pytest.raises(ApiError) as caught:
        await read_json_body({"headers": headers}, receiving([]))

    assert caught.value.status == 413


async def test_a_body_that_does_not_come_ends_in_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers.asgi, "BODY_TIMEOUT_S", 0.01)

    with pytest.raises(ApiError) as caught:
        await read_json_body({"headers": JSON}, receiving([body(b"{", more=True)]))

    assert caught.value.status == 408


async def test_a_block_ends_where_it_waits_when_the_client_leaves() -> None:
    steps: list[str] = []

    async def run() -> None:
        async with WhileConnected(receiving([body(b""), GONE])):
            try:
                await asyncio.Event().wait()
            finally:
                steps.append("cleaned up")

    with pytest.raises(ClientGone):
        await run()

    assert steps == ["cleaned up"]
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_block_that_ends_first_is_not_disturbed() -> None:
    async with WhileConnected(receiving([])):
        await asyncio.sleep(0)

    await asyncio.sleep(0)


async def test_an_error_of_the_block_comes_out_as_it_is() -> None:
    with pytest.raises(ValueError, match="mine"):
        async with WhileConnected(receiving([])):
            raise ValueError("mine")


async def test_a_cancellation_from_outside_is_no_disconnect() -> None:
    entered = asyncio.Event()

    async def run() -> None:
        async with WhileConnected(receiving([])):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(run())
    await entered.wait()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancelled_and_left_at_once_it_stays_cancelled() -> None:
    leave = asyncio.Event()

    async def receive() -> Message:
        await leave.wait()
        return GONE

    async def run() -> None:
        async with WhileConnected(receive):
            await asyncio.Event().wait()

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    leave.set()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
