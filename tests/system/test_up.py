"""`warmpath up` as a user meets it, over simulated replicas: the same gateway, server and scheduler, ready in seconds."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.system.processes import (
    WARMPATH,
    Up,
    alive,
    descendants,
    interrupt,
    processes_of,
    running_up,
    start_up,
    wait_until,
)

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with running_up(tmp_path_factory.mktemp("up"), "--model", "simulated") as system:
        yield system


def test_it_is_ready_in_seconds_and_says_how_to_use_it(up: Up) -> None:
    assert up.start_cpu_s < 2 * 15  # twice: see `test_smoke`
    assert up.base_url.endswith("/v1")
    assert up.api_key.startswith("wp-")
    assert up.admin_key.startswith("wpa-")


def test_an_openai_client_streams_a_made_up_answer(up: Up) -> None:
    with up.client as client:
        chunks = client.chat.completions.create(
            model=up.model, messages=[{"role": "user", "content": "Tell me a story"}], max_tokens=5, stream=True
        )

        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    assert text


def test_a_second_turn_goes_back_to_the_replica_that_holds_the_first(up: Up) -> None:
    story = "Once upon a time there was a fox who lived by the sea. " * 20
    with up.client as client:
        replicas, cached = [], []
        for turn in range(4):
            raw = client.chat.completions.with_raw_response.create(
                model=up.model,
                messages=[{"role": "user", "content": story + "And then? " * turn}],
                max_tokens=2,
            )
            replicas.append(raw.headers["x-warmpath-decision"].split(",")[0])
            usage = raw.parse().usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            cached.append(usage.prompt_tokens_details.cached_tokens or 0)

    assert len(set(replicas)) == 1
    assert cached[0] < 32
    assert all(count >= len(story) // 4 // 16 * 16 - 16 for count in cached[1:])


def test_every_answer_has_the_callers_request_id(up: Up) -> None:
    headers = {"authorization": f"Bearer {up.api_key}", "x-request-id": "mine-1"}

    assert httpx.get(f"{up.base_url}/models", headers=headers).headers["x-request-id"] == "mine-1"
    assert httpx.get(f"{up.base_url}/nothing").headers["x-request-id"].startswith("req-")


def test_replicas_and_keys_can_be_asked_for(up: Up) -> None:
    table = up.run("replicas")
    made = up.run("keys", "create", "--name", "someone")
    listed = up.run("keys", "list")

    assert table.stdout.count("ready") == 2
    assert "worker-0" in table.stdout
    assert made.stdout.startswith("wp-")
    assert "someone" in listed.stdout
    assert made.stdout.strip() not in listed.stdout, "a secret is shown once"


def test_a_request_is_explained_without_being_sent_and_past_ones_are_listed(up: Up, tmp_path: Path) -> None:
    body = tmp_path / "request.json"
    body.write_text('{"model": "simulated", "prompt": "Once upon a time"}')
    before = json.loads(up.run("decisions", "--json", "--limit", "1000").stdout)

    explained = json.loads(up.run("explain", str(body), "--json").stdout)
    table = up.run("explain", "--prompt", "Once upon a time").stdout
    after = json.loads(up.run("decisions", "--json", "--limit", "1000").stdout)

    assert explained["chosen"].startswith("worker-")
    assert {each["replica"] for each in explained["candidates"]} == {"worker-0", "worker-1"}
    assert "policy cost" in table
    assert len(after) == len(before)
    assert up.run("decisions").returncode == 0


def test_the_smoke_run_finds_nothing_wrong_with_made_up_text(up: Up) -> None:
    smoke = up.run("smoke")

    assert smoke.returncode == 0, smoke.stdout + smoke.stderr
    assert "endpoint ok: simulated" in smoke.stdout


def test_revoking_reaches_nothing_but_keys(up: Up) -> None:
    failed = up.run("keys", "revoke", "../replicas/worker-0")

    assert failed.returncode != 0
    assert "worker-0" in up.run("replicas").stdout


@pytest.mark.parametrize("args", [("--admin-url", "http://[::1", "--admin-key", "x"), ("--admin-key", "schlüssel")])
def test_an_odd_address_or_key_of_the_gateway_is_one_clear_line(up: Up, args: tuple[str, ...]) -> None:
    failed = up.run("replicas", *args)

    assert failed.returncode == 1
    assert re.fullmatch(r"Error: .+\n", failed.stderr)


def test_metrics_tell_what_happened(up: Up) -> None:
    with up.client as client:
        client.completions.create(model=up.model, prompt="hello", max_tokens=2)

    text = httpx.get(f"{up.admin_url}/metrics").text

    assert f'warmpath_requests_total{{model="{up.model}",status="200"}}' in text
    assert 'warmpath_replica_healthy{model="simulated",replica="worker-0"} 1.0' in text


def test_a_drained_replica_gets_nothing_new(up: Up) -> None:
    up.admin("POST", "/replicas/worker-0/drain", json={"deadline_s": 5}).raise_for_status()
    try:
        with up.client as client:
            for number in range(6):
                raw = client.completions.with_raw_response.create(
                    model=up.model, prompt=f"{number} hello", max_tokens=1
                )
                assert 'replica="worker-1"' in raw.headers["x-warmpath-decision"]
    finally:
        up.admin("DELETE", "/replicas/worker-0/drain").raise_for_status()


def test_ctrl_c_ends_everything_and_the_next_start_has_the_same_keys(tmp_path: Path) -> None:
    first = start_up(tmp_path, "--model", "simulated", "--workers", "1")
    children = processes_of(first)

    took_s = interrupt(first)

    assert took_s < 10, "less than running answers would have"
    assert first.process.returncode == 0
    assert len(children) >= 2
    assert not [pid for pid in children if alive(pid)]
    with running_up(tmp_path, "--model", "simulated", "--workers", "1") as second:
        assert (second.api_key, second.admin_key) == (first.api_key, first.admin_key)


def test_a_killed_up_leaves_no_process_behind(tmp_path: Path) -> None:
    up = start_up(tmp_path, "--model", "simulated", "--workers", "1")
    children = processes_of(up)

    os.kill(up.process.pid, signal.SIGKILL)
    up.process.communicate()

    wait_until(lambda: not any(map(alive, children)), 10, "its children end")


def test_a_proxy_for_the_way_out_is_not_asked_for_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    with running_up(tmp_path, "--model", "simulated", "--workers", "1") as up:
        assert "worker-0" in up.run("replicas").stdout


def test_ctrl_c_while_the_model_is_fetched_leaves_no_process_and_no_half_file(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as index, (tmp_path / "stderr").open("w+") as stderr:
        index.settimeout(60)
        port = index.getsockname()[1]
        env = {
            **os.environ,
            "XDG_CACHE_HOME": str(tmp_path),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": f"http://127.0.0.1:{port}/simple",
            "NO_PROXY": "127.0.0.1",
        }
        process = subprocess.Popen(
            [WARMPATH, "up", "--port", "28731", "--admin-port", "28732"],
            cwd=tmp_path,
            stderr=stderr,
            env=env,
            start_new_session=True,
        )
        with index.accept()[0]:  # pip is there, and waits for an answer
            children = descendants(process.pid)

            os.killpg(process.pid, signal.SIGINT)  # a terminal's Ctrl-C reaches the whole group
            process.wait(timeout=5)

        stderr.seek(0)
        said = stderr.read()
    assert process.returncode == 0
    assert said.endswith("stopping\n")
    assert "Traceback" not in said
    assert len(children) == 2
    assert not any(map(alive, children))
    assert not list((tmp_path / "warmpath" / "models").iterdir())


def test_a_dead_worker_ends_up_with_one_clear_line(tmp_path: Path) -> None:
    up = start_up(tmp_path, "--model", "simulated", "--workers", "1")
    worker = next(pid for pid in processes_of(up) if b"workers" in Path(f"/proc/{pid}/cmdline").read_bytes())

    os.kill(worker, signal.SIGKILL)
    _, stderr = up.process.communicate(timeout=15)

    assert up.process.returncode == 1
    assert "worker-0 ended with code -9" in stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--model", "/no/such/folder"], "MODEL=simulated"),
        (["--model", "simulated", "--admin-port", "28711"], "must differ"),
        (["--model", "simulated", "--", "--no-such-option"], "No such option"),
    ],
)
def test_what_cannot_start_says_so_and_fails(tmp_path: Path, args: list[str], says: str) -> None:
    failed = _up(tmp_path, "--port", "28711", "--admin-port", "28712", *args)

    assert failed.returncode != 0
    assert says in failed.stderr
    assert len(re.findall(r"^Error: ", failed.stderr, re.MULTILINE)) == 1
    assert "Traceback" not in failed.stderr


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        failed = _up(tmp_path, "--model", "simulated", "--port", str(port))

    assert failed.returncode != 0
    assert f"port {port} is in use" in failed.stderr


def test_a_state_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / ".warmpath").write_text("a file in its place")

    failed = _up(tmp_path, "--model", "simulated", "--port", "28721", "--admin-port", "28722")

    assert failed.returncode != 0
    assert ".warmpath" in failed.stderr
    assert "Traceback" not in failed.stderr


def _up(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([WARMPATH, "up", *args], cwd=folder, capture_output=True, text=True, timeout=60)
