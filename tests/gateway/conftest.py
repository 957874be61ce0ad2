"""A test module that sets LOOP_FACTORIES runs its async tests on each of these event loops.

And what several modules look at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from gateway.server.connection import Connection
from gateway.server.known_head import KnownHead


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]] | None:
    return getattr(getattr(item, "module", None), "LOOP_FACTORIES", {"asyncio": asyncio.new_event_loop})


@pytest.fixture
def recognized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Body lengths of the requests whose heads were recognized, on any connection."""
    lengths: list[int] = []
    take = Connection._take_known

    def noted(self: Connection, known: KnownHead, data: bytes) -> bytes:
        if (found := known.match(data)) is not None:
            lengths.append(found[0])
        return take(self, known, data)

    monkeypatch.setattr(Connection, "_take_known", noted)
    return lengths
