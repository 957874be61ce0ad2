"""Traces across real processes, switched on as operators do it: by the standard variables."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.otlp import collecting
from tests.system.processes import wait_until
from tests.system.test_serve import serve, worker

pytestmark = pytest.mark.system

CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_gateway_and_worker_processes_tell_one_trace(tmp_path: Path) -> None:
    with collecting() as collector:
        variables = {
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": collector.url,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }
        with (
            worker(tmp_path, **variables) as replica,
            serve(tmp_path, "--open", "--replicas", replica, **variables, WARMPATH_LOG__ACCESS="access.log") as urls,
        ):
            wait_until(lambda: httpx.get(f"{urls[1]}/ready").is_success, 60, "a replica is found healthy")
            body = {"model": "simulated", "prompt": "Tell me a story.", "max_tokens": 3}
            answer = httpx.post(f"{urls[0]}/v1/completions", json=body, headers={"traceparent": CALLER}, timeout=20)
            assert answer.status_code == 200, answer.text
            wait_until(lambda: len(collector.spans) == 5, 60, "all spans are here, while both still run")

    names = {span.name for span in collector.spans}
    assert names == {"POST /v1/completions", "text_completion simulated", "queue", "prefill", "decode"}
    assert {span.trace_id for span in collector.spans} == {CALLER.split("-")[1]}
    assert CALLER.split("-")[1] in (tmp_path / "access.log").read_text()
