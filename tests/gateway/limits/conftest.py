from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from gateway.limits.link import LedgerLink
from tests.gateway.limits.ledgers import Clock, in_redis, supervised
from tests.redis_server import RedisServer, redis_server


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


@pytest.fixture(params=["supervisor", "redis"])
async def ledger(request: pytest.FixtureRequest) -> AsyncIterator[tuple[LedgerLink, Clock]]:
    """A ledger somewhere else, and its clock."""
    if request.param == "supervisor":
        clock = Clock()
        yield supervised(clock)[0], clock
    else:
        async with in_redis(request.getfixturevalue("server")) as found:
            yield found
