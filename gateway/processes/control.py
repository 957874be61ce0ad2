"""What goes over the channels between the supervisor and its data processes: topics, values and their encoding.

topic      direction          payload                    answer
start      to the process     `Start`                    '' once it takes connections, or it failed
settings   to the process     `settings_bytes`           '' once they are in force
members    to the process     list of `Member`           '' once it is routed by
keys       to the process     an encoded ring            '' once it holds
peers      to the process     list of ids (post)
metrics    to the process     ''                         list of `Family`
decisions  to the process     ''                         list of `DecisionBody`
stop       to the process     '' (post)                  twice: without waiting for answers that run
unready    to the supervisor  why, '' when ready (post)
ledger     to the supervisor  `gateway.limits.link`      a verdict; as a post none
in_flight  to the supervisor  how many requests are answered there (post)
queued     to the supervisor  how many of them wait for a replica (post)
ended      to the supervisor  `Ended` (post)
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
from pydantic import SecretStr

from gateway.admin.bodies import DecisionBody
from gateway.processes.members import Member
from gateway.processes.merged_metrics import Family
from gateway.settings import Settings

__all__ = [
    "DECISIONS",
    "ENDED",
    "FAMILIES",
    "IDS",
    "MEMBERS",
    "Ended",
    "Start",
    "decode_start",
    "encode",
    "settings_bytes",
    "settings_of",
]


class Start(msgspec.Struct, frozen=True):
    """All that a data process needs to begin."""

    process: int
    settings: bytes
    host: str
    port: int
    bus_folder: str
    peers: list[int]
    keys: bytes
    members: list[Member]
    healthy: list[str]
    """Replicas that the supervisor knows to be well,"""
    exact: list[str]
    """and those whose caches it knows."""


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """Requests that ended in a process, all that it ever had."""

    requests: int = 0
    failures: int = 0


encode = msgspec.msgpack.Encoder().encode
decode_start = msgspec.msgpack.Decoder(Start).decode
MEMBERS = msgspec.msgpack.Decoder(list[Member])
ENDED = msgspec.msgpack.Decoder(Ended)
IDS = msgspec.msgpack.Decoder(list[int])
FAMILIES = msgspec.msgpack.Decoder(list[Family])
DECISIONS = msgspec.msgpack.Decoder(list[DecisionBody])


def settings_bytes(settings: Settings) -> bytes:
    """With their secrets: for a channel, never for a log."""
    return json.dumps(settings.model_dump(), default=_plain).encode()


def settings_of(data: bytes) -> Settings:
    return Settings.model_validate_json(data)


def _plain(value: Any) -> str:
    return value.get_secret_value() if isinstance(value, SecretStr) else str(value)
