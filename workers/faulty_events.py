"""An event stream that loses, repeats, swaps or delays what it says, by a `FaultPlan`.

It takes the replica's own bytes apart into frames and puts them together again; as long as no fault concerns the stream, bytes
pass as they are.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

import msgspec
from starlette.types import Message, Scope, Send

from router.wire import Batch, Frame, FrameDecoder, Hello, encode_frame
from workers.asgi import ClientGone
from workers.faults import FaultPlan

__all__ = ["FaultyEvents"]


class FaultyEvents:
    """One stream. `plan` is asked at each message, so faults may change while the stream is open."""

    def __init__(self, send: Send, plan: Callable[[], FaultPlan], *, restarted: bool) -> None:
        """`restarted`: it speaks as a replica with a new epoch, from the first batch on."""
        self._send = send
        self._plan = plan
        self._epoch = secrets.token_hex(8) if restarted else None
        self._held: Batch | None = None

    def greet(self, scope: Scope) -> Scope:
        """The request as the replica inside shall see it: a restarted one knows nothing of what the caller has."""
        return scope if self._epoch is None else {**scope, "query_string": b""}

    async def send(self, message: Message) -> None:
        if not message.get("body") or not (self._epoch or self._held or self._plan().spoils_batches):
            await self._send(message)
            return
        out: list[bytes] = []
        for frame in FrameDecoder().feed(message["body"]):  # every message holds whole frames
            out += map(encode_frame, await self._spoil(frame, out))
        await self._flush(out)

    async def _spoil(self, frame: Frame, before: list[bytes]) -> list[Frame]:
        """What to say in place of a frame; `before` is said first where it has to wait."""
        if isinstance(frame, Hello) and self._epoch is not None:
            return [msgspec.structs.replace(frame, epoch=self._epoch)]
        if not isinstance(frame, Batch):
            return [frame]
        fault = self._plan().of_batch()
        held, self._held = self._held, None
        late = [held] if held is not None else []
        match fault.kind if fault is not None else None:
            case "drop-events":
                return [*late]
            case "repeat-events":
                return [frame, *late, frame]
            case "reorder-events":
                self._held = frame
                return [*late]
            case "slow-events":
                assert fault is not None
                await self._flush(before)
                await asyncio.sleep(fault.value or 0.0)
            case "cut-events":
                await self._flush(before)
                raise ClientGone
        return [frame, *late]

    async def _flush(self, frames: list[bytes]) -> None:
        data = b"".join(frames)
        frames.clear()
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
