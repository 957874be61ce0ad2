"""A test module that sets LOOP_FACTORIES runs its async tests on each of these event loops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]] | None:
    return getattr(getattr(item, "module", None), "LOOP_FACTORIES", {"asyncio": asyncio.new_event_loop})
