"""A gateway without a file descriptor to spare: its own trouble is not held against its replicas."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
from pathlib import Path

import httpx
import pytest

from tests.gateway.stub import STREAM_HEAD, chunked, event, stub
from tests.system.test_shutdown import body, exit_code, stopping_gateway

pytestmark = pytest.mark.system


def first_free(pid: int) -> int:
    """The descriptor that a process would get next. A limit of just that leaves it none."""
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    return min(set(range(len(used) + 1)) - used)


async def test_no_descriptor_for_a_replica_is_a_503_and_costs_the_replica_nothing(tmp_path: Path) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunked(event("begun ")))
        await asyncio.Event().wait()

    async with stub(answer) as replica, stopping_gateway(tmp_path, replica) as (gateway, client, admin):
        clients = [httpx.AsyncClient(base_url=client.base_url, trust_env=False, timeout=20) for _ in range(8)]
        async with contextlib.AsyncExitStack() as stack:
            for each in clients:
                await stack.enter_async_context(each)
                (await each.get("/health")).raise_for_status()  # it has its connection now
            (await admin.get("/health")).raise_for_status()
            before = resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, (first_free(gateway.pid), before[1]))

            statuses = []
            for each in clients:
                request = each.build_request("POST", "/v1/chat/completions", json=body(stream=True))
                answered = await each.send(request, stream=True)
                stack.push_async_callback(answered.aclose)
                statuses.append(answered.status_code)
            refused = answered
            await refused.aread()
            ready = await admin.get("/ready")
            metrics = (await admin.get("/metrics")).text

            resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, before)
            async with client.stream("POST", "/v1/chat/completions", json=body(stream=True)) as later:
                first = await anext(later.aiter_lines())
        gateway.send_signal(signal.SIGTERM)
        assert await exit_code(gateway) == 0

    taken = statuses.count(200)
    assert statuses == [200] * taken + [503] * (8 - taken)
    assert taken < 6, "some find an idle connection, the others none"
    assert refused.json()["error"]["code"] == "gateway_overloaded"
    assert refused.headers["retry-after"] == "1"
    assert ready.status_code == 200
    assert f"warmpath_gateway_overloaded_total {8 - taken}.0" in metrics
    assert "begun" in first, "seven refusals in a row would have ejected it"
