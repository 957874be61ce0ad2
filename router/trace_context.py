"""W3C trace context: the header that joins the spans of client, gateway and replica. Pure.

    traceparent: 00-<32 hex digits: trace>-<16 hex digits: the caller's span>-<2 hex digits: flags>

What must hold: what does not parse is no context at all, so that nothing of an unknown form is passed on or recorded.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

__all__ = ["TraceContext", "parse_traceparent"]

_SAMPLED: Final = 0x01

_TRACEPARENT: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class TraceContext(msgspec.Struct, frozen=True, gc=False):
    """One span's place in its trace."""

    trace_id: str
    span_id: str
    sampled: bool

    @property
    def traceparent(self) -> bytes:
        """As a header's value, for those whose parent this span is."""
        return f"00-{self.trace_id}-{self.span_id}-0{self.sampled:d}".encode()


def parse_traceparent(value: bytes) -> TraceContext | None:
    """None for what is no valid header. A later version's is read as far as it is known, as the standard asks."""
    found = _TRACEPARENT.fullmatch(value.strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == b"ff" or (more is not None and version == b"00"):
        return None
    if not trace_id.strip(b"0") or not span_id.strip(b"0"):
        return None
    return TraceContext(trace_id.decode(), span_id.decode(), bool(int(flags, 16) & _SAMPLED))
