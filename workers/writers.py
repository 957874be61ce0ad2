"""How an answer goes out: as one object at its end, or as events while it grows.

A stream has no status line before its first token: until then an error is a status, after it an event without `DONE`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

from workers.api_error import ApiError
from workers.asgi import Header, Reply
from workers.choice import Choice, Delta
from workers.shapes import DONE, Opening, Shape, Usage, error_event

__all__ = ["AnswerWriter", "Format", "StreamWriter", "WholeWriter"]

Format = Callable[[int, Callable[[], bytes]], Awaitable[bytes]]
"""Number of ids to tell at once, and what writes them down: with logprobs, many are not for the event loop."""

_EVENT_STREAM: Final[Sequence[Header]] = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class AnswerWriter(Protocol):
    async def open(self, choice: Choice, opening: Opening) -> None:
        """The engine has begun with a choice."""
        ...

    async def show(self, choice: Choice, delta: Delta) -> None: ...

    async def finish(self) -> None:
        """All choices have ended."""
        ...

    async def fail(self, error: ApiError) -> None:
        """Raises `error` as long as it can still be a status."""
        ...


class WholeWriter:
    def __init__(self, reply: Reply, shape: Shape, usage: Callable[[], Usage], format_: Format) -> None:
        self._reply = reply
        self._shape = shape
        self._usage = usage
        self._format = format_
        self._choices: dict[int, tuple[Opening, list[Delta]]] = {}

    async def open(self, choice: Choice, opening: Opening) -> None:
        self._choices[choice.index] = (opening, [])

    async def show(self, choice: Choice, delta: Delta) -> None:
        self._choices[choice.index][1].append(delta)

    async def finish(self) -> None:
        choices = [self._choices[index] for index in sorted(self._choices)]
        num_ids = sum(_num_echoed(opening) + sum(len(delta.ids) for delta in deltas) for opening, deltas in choices)
        body = await self._format(num_ids, lambda: self._shape.whole(choices, self._usage()))
        await self._reply.json(200, body)

    async def fail(self, error: ApiError) -> None:
        raise error


class StreamWriter:
    """Server-sent events, one a write."""

    def __init__(
        self,
        reply: Reply,
        shape: Shape,
        usage: Callable[[], Usage],
        format_: Format,
        *,
        numbered: bool,
        include_usage: bool,
        continuous_usage: bool,
        resumed: bool,
    ) -> None:
        """`resumed`: the client has seen the beginning, and perhaps the end of the choice."""
        self._reply = reply
        self._shape = shape
        self._usage = usage
        self._format = format_
        self._numbered = numbered
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._resumed = resumed

    async def open(self, choice: Choice, opening: Opening) -> None:
        await self._start()
        if self._resumed:
            return
        usage = self._usage_so_far()
        event = await self._format(_num_echoed(opening), lambda: self._shape.opening(choice.index, opening, usage))
        if event:
            await self._reply.chunk(event)

    async def show(self, choice: Choice, delta: Delta) -> None:
        await self._reply.chunk(
            self._shape.event(choice.index, delta, numbered=self._numbered, usage=self._usage_so_far())
        )

    async def finish(self) -> None:
        await self._start()
        if self._include_usage:
            await self._reply.chunk(self._shape.usage(self._usage()))
        await self._reply.end(DONE)

    async def fail(self, error: ApiError) -> None:
        if not self._reply.started:
            raise error
        await self._reply.end(error_event(error))

    async def _start(self) -> None:
        if not self._reply.started:
            await self._reply.start(200, _EVENT_STREAM)

    def _usage_so_far(self) -> Usage | None:
        return self._usage() if self._continuous_usage else None


def _num_echoed(opening: Opening) -> int:
    return len(opening.echo.ids) if opening.echo is not None else 0
