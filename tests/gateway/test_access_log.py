"""The access log: what a line says, what it never says, and that no disk or pipe can make a request wait or fail."""

from __future__ import annotations

import itertools
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.access_log import AccessLog, LineWriter, _pieces, open_access_log
from gateway.job import Record
from gateway.log_format import JsonFormatter
from tests.gateway.stub import DONE, MODEL, USAGE, event, gateway, hangs, says, streams, stub
from tests.gateway.test_telemetry import decision, record, usage
from tests.serving import eventually

NOW = 1_700_000_000.25


def lines(path: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def written(path: Path, *records: Record, at: float = NOW) -> list[dict[str, Any]]:
    log = AccessLog(LineWriter(path))
    for each in records:
        log.finished(each, at)
    log.close()
    return lines(path)


def test_a_line_says_what_became_of_a_request(tmp_path: Path) -> None:
    answered = record(
        model="m",
        status=200,
        stream=True,
        key_id="k1",
        tenant="t1",
        decision=decision(matched=64),
        tries=2,
        duration_s=1.25,
        queued_s=0.125,
        first_byte_s=0.5,
        usage=usage(100, 7, 48),
        client_retries=1,
    )

    (line,) = written(tmp_path / "log", answered)

    assert line == {
        "time": "2023-11-14T22:13:20.250Z",
        "request_id": "r",
        "status": 200,
        "endpoint": "/v1/completions",
        "duration_s": 1.25,
        "model": "m",
        "stream": True,
        "key_id": "k1",
        "tenant": "t1",
        "replica": "w1",
        "policy": "cost",
        "reason": "longest_match",
        "tries": 2,
        "queue_wait_s": 0.125,
        "ttft_s": 0.5,
        "prompt_tokens": 100,
        "cached_tokens": 48,
        "predicted_cached_tokens": 64,
        "completion_tokens": 7,
        "client_retries": 1,
    }


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    (line,) = written(tmp_path / "log", record(status=401, error_code="invalid_api_key"))

    assert set(line) == {"time", "request_id", "status", "endpoint", "duration_s", "error_code"}


def test_no_value_can_end_a_line(tmp_path: Path) -> None:
    (line,) = written(tmp_path / "log", record(model='m"\n{"status":200}\r\x1b[31m'))

    assert line["model"] == 'm"\n{"status":200}\r\x1b[31m'
    assert b"\x1b" not in (tmp_path / "log").read_bytes()


async def test_every_request_has_one_line_and_none_has_content(tmp_path: Path) -> None:
    canary = "canary-4711"
    file = tmp_path / "access.log"
    async with (
        stub(says(canary)) as replica,
        gateway(tmp_path / "state", replica, log={"access": str(file)}) as running,
    ):
        headers = {"x-stainless-retry-count": "2", "cookie": canary, "user-agent": canary, "x-request-id": "mine"}
        body = {"model": MODEL, "messages": [{"role": "user", "content": canary}]}
        await running.client.post(f"/v1/chat/completions?a={canary}", json=body, headers={**running.auth, **headers})
        await running.chat(canary, model=canary)
        await running.client.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {canary}"})
        replica.answer = streams(event(canary), event("", "stop"), USAGE, DONE)
        await running.chat(canary, stream=True)
        replica.answer = hangs
        with pytest.raises(httpx.ReadTimeout):
            await running.client.post("/v1/chat/completions", json=body, headers=running.auth, timeout=0.2)
        await eventually(lambda: file.read_bytes().count(b"\n") == 5)

    assert [line["status"] for line in lines(file)] == [200, 404, 401, 200, 499]
    first = lines(file)[0]
    assert (first["request_id"], first["client_retries"], first["prompt_tokens"]) == ("mine", 2, 9)
    assert canary.encode() not in file.read_bytes()
    assert running.key.encode() not in file.read_bytes()


def test_a_full_disk_costs_lines_and_nothing_else() -> None:
    log = AccessLog(LineWriter(Path("/dev/full")))

    for _ in range(100):
        log.finished(record(status=200), NOW)
    log.close()

    assert log.num_dropped == 100


def test_a_pipe_that_nobody_reads_never_makes_a_request_wait() -> None:
    reader, writer = os.pipe()
    lines_of_a_pipe = LineWriter(writer)
    line = b"x" * 200 + b"\n"

    most_s = 0.0
    for _ in range(20_000):  # 4 MB into a pipe of 64 KB and a buffer of 8,192 lines
        began = time.thread_time()
        lines_of_a_pipe.write(line)
        most_s = max(most_s, time.thread_time() - began)

    assert most_s < 0.01
    assert 20_000 - 8192 - 2048 < lines_of_a_pipe.num_dropped < 20_000
    os.close(reader)  # the thread gets an error and goes on
    wait_until(lambda: lines_of_a_pipe.num_dropped > 20_000 - 1024)
    lines_of_a_pipe.close()
    os.close(writer)


def test_a_log_that_was_rotated_goes_on_in_a_new_file(tmp_path: Path) -> None:
    file, moved = tmp_path / "log", tmp_path / "log.1"
    log = AccessLog(LineWriter(file))
    log.finished(record(status=200), NOW)
    wait_until(lambda: file.read_bytes().endswith(b"\n"))

    file.rename(moved)
    log.finished(record(status=404), NOW)
    log.close()

    assert [line["status"] for line in lines(moved)] == [200]
    assert [line["status"] for line in lines(file)] == [404]


@given(st.lists(st.binary(max_size=30).map(lambda text: text + b"\n")), st.integers(1, 64))
def test_lines_go_out_in_order_in_pieces_that_a_pipe_takes_whole(lines: list[bytes], most_bytes: int) -> None:
    pieces = list(_pieces(lines, most_bytes))

    assert [line for piece in pieces for line in piece] == lines
    assert all(len(piece) == 1 or sum(map(len, piece)) <= most_bytes for piece in pieces)
    for piece, following in itertools.pairwise(pieces):
        assert sum(map(len, piece)) + len(following[0]) > most_bytes  # none is smaller than it could be


def test_a_line_says_when_its_request_ended_not_when_it_was_written(tmp_path: Path) -> None:
    log = AccessLog(LineWriter(tmp_path / "log"))
    log.finished(record(status=200), 1_700_000_000.5)
    log.close()

    assert lines(tmp_path / "log")[0]["time"] == "2023-11-14T22:13:20.500Z"


def test_a_log_can_be_off_and_a_folder_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    assert open_access_log("off") is None
    with pytest.raises(OSError, match="No such file"):
        open_access_log(str(tmp_path / "nowhere" / "log"))


def test_a_line_costs_a_few_microseconds() -> None:
    """The least of many rounds, so that a loaded machine only makes it slower to find."""
    log = AccessLog(LineWriter(Path(os.devnull)))
    answered = record(status=200, model="m", decision=decision(matched=64), usage=usage(100, 7, 48), first_byte_s=0.5)

    rounds = []
    for _ in range(20):
        began = time.thread_time()
        for _ in range(100):
            log.finished(answered, NOW)
        rounds.append((time.thread_time() - began) / 100)
    log.close()

    assert min(rounds) < 20e-6  # 4 us on an idle machine


def test_own_messages_can_be_json_with_the_exception_in_the_line() -> None:
    try:
        raise ValueError('a "bug"')
    except ValueError:
        log_record = logging.LogRecord("warmpath", logging.ERROR, "f.py", 1, "%s\nfailed", ("r1",), sys.exc_info())

    text = JsonFormatter().format(log_record)

    line = msgspec.json.decode(text)
    assert "\n" not in text
    assert (line["level"], line["logger"], line["message"]) == ("error", "warmpath", "r1\nfailed")
    assert line["exception"].endswith('ValueError: a "bug"')
