"""The replicas that the contract tests run over: each is started once, in a thread with its own event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager

import httpx
import pytest

from tests.replicas import Replica, in_a_thread, start_simulated, start_torch

STARTS: dict[str, Callable[[], AbstractAsyncContextManager[Replica]]] = {
    "simulated": start_simulated,
    "torch": start_torch,
}


@pytest.fixture(scope="session", params=["simulated", pytest.param("torch", marks=pytest.mark.model)])
def replica(request: pytest.FixtureRequest) -> Iterator[Replica]:
    with in_a_thread(STARTS[request.param]) as replica:
        yield replica


@pytest.fixture
async def http(replica: Replica) -> AsyncIterator[httpx.AsyncClient]:
    """A client that shows the replica's credential, as a gateway does."""
    async with replica.client() as client:
        yield client


@pytest.fixture
async def stranger(replica: Replica) -> AsyncIterator[httpx.AsyncClient]:
    """A client without it."""
    async with replica.client(credential=False) as client:
        yield client
