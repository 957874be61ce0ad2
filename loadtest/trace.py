"""Mooncake's conversation trace: an hour of requests to a real chat service, as arrivals, lengths and block numbers.

Its first 1,000 rows lie in `loadtest/data`; `warmpath bench data` brings all 12,031.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Final

import click
import httpx
import msgspec

__all__ = ["TraceRow", "TraceUnreadable", "data", "read_trace", "whole_trace_path"]

URL: Final = "https://raw.githubusercontent.com/kvcache-ai/Mooncake/main/FAST25-release/traces/conversation_trace.jsonl"
WHOLE_ROWS: Final = 12_031

_FIRST_ROWS: Final = "mooncake_conversation_1000.jsonl.gz"
_GZIP: Final = b"\x1f\x8b"
_MAX_BYTES: Final = 64 << 20
"""Ten times the trace: an answer that is larger is something else."""
_TIMEOUT_S: Final = 30.0

_Count = Annotated[int, msgspec.Meta(ge=0)]


class TraceUnreadable(Exception):
    """No trace is to be had there, or what is there is none."""


class TraceRow(msgspec.Struct, frozen=True):
    timestamp: _Count
    """Milliseconds from the start."""
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=1)]
    hash_ids: Annotated[list[int], msgspec.Meta(min_length=1)]
    """One for each 512 tokens; the same number means the same block after the same blocks."""


def read_trace(path: Path | None = None) -> Iterator[TraceRow]:
    """All rows of a file, packed by gzip or not; without one, of the rows that are here. Raises TraceUnreadable."""
    source = path or files("loadtest") / "data" / _FIRST_ROWS
    try:
        packed = source.read_bytes()
    except OSError as error:
        raise TraceUnreadable(f"{path}: {error.strerror}") from error
    return _rows(packed, str(source))


def whole_trace_path() -> Path:
    """Where `warmpath bench data` puts it."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "warmpath" / "traces" / "mooncake_conversation.jsonl"


def _rows(packed: bytes, source: str) -> Iterator[TraceRow]:
    try:
        text = gzip.decompress(packed) if packed.startswith(_GZIP) else packed
    except (OSError, EOFError) as error:
        raise TraceUnreadable(f"{source}: {error}") from error
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            yield msgspec.json.decode(line, type=TraceRow)
        except msgspec.DecodeError as error:
            raise TraceUnreadable(f"{source}, line {number}: {error}") from error


def _read_source(source: str) -> bytes:
    if "://" not in source:
        try:
            return Path(source).read_bytes()
        except OSError as error:
            raise TraceUnreadable(f"{source}: {error.strerror}") from error
    body = bytearray()
    try:
        with httpx.stream("GET", source, timeout=_TIMEOUT_S, follow_redirects=True) as answer:
            answer.raise_for_status()
            for piece in answer.iter_bytes():
                body += piece
                if len(body) > _MAX_BYTES:
                    raise TraceUnreadable(f"{source}: more than {_MAX_BYTES >> 20} MiB")
    except (httpx.HTTPError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise TraceUnreadable(f"{source}: {str(error) or type(error).__name__}") from error
    return bytes(body)


@click.command(
    "data",
    epilog="""\b
Examples:
  warmpath bench data                              # from the project that published it, 3 MB
  warmpath bench data --from conversation_trace.jsonl
  warmpath bench fleet --trace whole --load 1.5    # an hour at six times its pace and three times the speed: 3 minutes
""",
)
@click.option(
    "--from", "source", default=URL, metavar="PATH|URL", help="Where to take it from.  [default: its publisher]"
)
def data(source: str) -> None:
    """Bring the whole conversation trace, of which the first 1,000 requests are here already."""
    try:
        packed = _read_source(source)
        rows = list(_rows(packed, source))
        first = list(read_trace())
        if rows[: len(first)] != first:
            raise TraceUnreadable(
                f"{source}: not Mooncake's conversation trace, whose first {len(first)} requests are here"
            )
    except TraceUnreadable as error:
        raise click.ClickException(str(error)) from error
    path = whole_trace_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(gzip.decompress(packed) if packed.startswith(_GZIP) else packed)
    partial.replace(path)
    if len(rows) != WHOLE_ROWS:
        click.echo(f"note: {len(rows)} requests, where the published trace has {WHOLE_ROWS}", err=True)
    click.echo(path)
