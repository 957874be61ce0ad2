"""A replica's stream as a gateway reads it: what was told, and what to send to another replica when it breaks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from router.wire import encode_ids, pack_ids

__all__ = ["data_of", "events_in", "is_usage", "resumption_of", "told_ids"]


def events_in(stream: str) -> list[str]:
    assert stream.endswith("\n\n")
    return stream[:-2].split("\n\n")


def data_of(event: str) -> Any:
    data = event.partition("data: ")[2]
    return data if data == "[DONE]" else json.loads(data)


def is_usage(event: str) -> bool:
    """The chunk that has the usage and nothing else."""
    return '"choices":[],' in event


def told_ids(events: Sequence[str]) -> list[int]:
    """The ids of the answer so far. Each is told once, in order."""
    told: list[int] = []
    for event in events:
        if event.startswith("id: "):
            number, _, ids = event.partition("\n")[0].removeprefix("id: ").partition(":")
            assert int(number) == len(told)
            told += [int(id_) for id_ in ids.split(",")]
    return told


def resumption_of(events: Sequence[str]) -> dict[str, Any]:
    """`router.wire.Resume` after these."""
    head = data_of(events[0])
    return {"ids": encode_ids(pack_ids(told_ids(events))), "response_id": head["id"], "created": head["created"]}
