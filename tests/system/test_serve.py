"""`warmpath serve` alone: in front of servers it did not start, and with its settings."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import yaml

from tests.system.processes import HAS_HUGE_PAGES, WARMPATH, free_ports, huge_kb, wait_until

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def process(*args: str, folder: Path, **env: str) -> Iterator[subprocess.Popen[str]]:
    running = subprocess.Popen(
        args, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **env}
    )
    try:
        yield running
    finally:
        running.send_signal(signal.SIGTERM)
        running.communicate(timeout=30)


@contextlib.contextmanager
def worker(folder: Path, *args: str, **env: str) -> Iterator[str]:
    """A simulated replica on its own; its URL."""
    with process(sys.executable, "-m", "workers", "simulated", *args, folder=folder, **env) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if found := re.match(r"listening on (\S+)", line):
                yield found[1]
                return
        raise AssertionError("the worker did not start")


@contextlib.contextmanager
def serve(folder: Path, *args: str, **env: str) -> Iterator[tuple[str, str]]:
    """A gateway; the base URLs of its two listeners."""
    port, admin_port = free_ports(2)
    with process(WARMPATH, "serve", "--port", str(port), "--admin-port", str(admin_port), *args, folder=folder, **env):
        urls = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}"
        wait_until(lambda: _answers(f"{urls[1]}/health"), 60, "the gateway starts")
        yield urls


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url).is_success
    return False


def test_an_open_gateway_fronts_servers_it_did_not_start(tmp_path: Path) -> None:
    with (
        worker(tmp_path) as one,
        worker(tmp_path) as two,
        serve(tmp_path, "--open", "--replicas", f"{one},{two}/v1") as (url, admin_url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="anything", max_retries=0) as client,
    ):
        wait_until(lambda: _answers(f"{admin_url}/ready"), 60, "a replica is found healthy")
        model = next(iter(client.models.list())).id

        stories = [f"Story {number}: " + "a long tale of the sea. " * 100 for number in range(2)]
        cached = []
        for turn in range(3):
            for story in stories:
                usage = client.completions.create(model=model, prompt=story + "And? " * turn, max_tokens=1).usage
                assert usage is not None
                assert usage.prompt_tokens_details is not None
                cached.append(usage.prompt_tokens_details.cached_tokens or 0)

    assert model == "simulated"
    assert all(count > 500 for count in cached[2:]), "each story goes back to the replica that saw it"


@pytest.mark.skipif(not HAS_HUGE_PAGES, reason="the kernel makes no huge pages at once")
def test_a_gateway_serves_from_a_heap_on_huge_pages(tmp_path: Path) -> None:
    port, admin_port = free_ports(2)
    ports = ("--port", str(port), "--admin-port", str(admin_port))
    args = ("serve", "--open", "--replicas", "http://127.0.0.1:1", *ports)
    with process(WARMPATH, *args, folder=tmp_path, WARMPATH_HUGE_PAGES="on") as gateway:
        wait_until(lambda: _answers(f"http://127.0.0.1:{admin_port}/health"), 60, "the gateway starts")

        assert huge_kb(gateway.pid) > 8 << 10


def test_a_second_ctrl_c_waits_for_no_answer(tmp_path: Path) -> None:
    port, admin_port = free_ports(2)
    url = f"http://127.0.0.1:{port}"
    ports = ("--port", str(port), "--admin-port", str(admin_port))
    with (
        worker(tmp_path) as replica,
        process(WARMPATH, "serve", "--open", "--replicas", replica, *ports, folder=tmp_path) as gateway,
    ):
        wait_until(lambda: _answers(f"http://127.0.0.1:{admin_port}/ready"), 60, "the gateway is ready")
        body = {"model": "simulated", "prompt": "long", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as answer:
            pieces = answer.iter_raw()  # kept: when it goes, the connection does
            next(pieces)

            gateway.send_signal(signal.SIGINT)
            wait_until(lambda: not _answers(f"{url}/health"), 5, "it stops accepting")
            assert gateway.poll() is None
            gateway.send_signal(signal.SIGINT)

            assert gateway.wait(timeout=3) == 0


def test_open_is_refused_where_others_could_reach_it(tmp_path: Path) -> None:
    refused = _run(tmp_path, "serve", "--open", "--host", "0.0.0.0")

    assert refused.returncode != 0
    assert "open needs host 127.0.0.1" in refused.stderr


def test_the_first_start_makes_keys_and_shows_them_once(tmp_path: Path) -> None:
    ports = [str(port) for port in free_ports(2)]
    shown = []
    for _ in range(2):
        with process(
            WARMPATH, "serve", "--port", ports[0], "--admin-port", ports[1], folder=tmp_path, PYTHONUNBUFFERED="1"
        ) as running:
            wait_until(lambda: _answers(f"http://127.0.0.1:{ports[1]}/health"), 60, "the gateway starts")
            running.send_signal(signal.SIGTERM)
            out, _ = running.communicate(timeout=30)
        shown.append(re.findall(r"wp[aj]?-\S+", out))
        stored = (tmp_path / ".warmpath" / "keys.json").read_text()
        assert not [key for key in shown[0] if key in stored], "only digests are kept"

    assert len(shown[0]) == 3
    assert shown[1] == []


@pytest.mark.parametrize("name", ["gateway.yaml", "settings.yaml", "static.yaml"])
def test_sample_settings_load(tmp_path: Path, name: str) -> None:
    printed = _run(tmp_path, "serve", "--config", str(ROOT / "deploy" / name), "--print-config")

    assert printed.returncode == 0, printed.stderr
    assert yaml.safe_load(printed.stdout)["server"]["port"] == 8000


def test_the_sample_environment_fits_the_sample_settings(tmp_path: Path) -> None:
    lines = (ROOT / "deploy" / "sample.env").read_text().splitlines()
    env = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    config = str(ROOT / "deploy" / "gateway.yaml")
    state = ("--state-dir", str(tmp_path / "state"), "--host", "127.0.0.1")

    printed = _run(tmp_path, "serve", "--config", config, "--print-config", **env)
    with serve(tmp_path, "--config", config, *state, **env) as (_, admin_url):
        headers = {"authorization": f"Bearer {env['WARMPATH_ADMIN__KEY']}"}
        answer = httpx.get(f"{admin_url}/admin/v1/replicas", headers=headers)

    assert answer.status_code == 200
    assert env["WARMPATH_ADMIN__KEY"] not in printed.stdout, "secrets are masked"
    assert env["WARMPATH_ADMIN__JOIN_TOKEN"] == env["WARMPATH_JOIN_TOKEN"]


def test_compose_names_what_there_is() -> None:
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    networks = yaml.safe_load((ROOT / "deploy" / "gateway.yaml").read_text())["registry"]["networks"]

    targets = set(re.findall(r"^FROM \S+ AS (\S+)", dockerfile, re.MULTILINE))
    services = compose["services"].values()
    assert {service["build"]["target"] for service in services if "build" in service} <= targets
    mounted = [mount for service in services for mount in service.get("volumes", []) if mount.startswith("./")]
    assert mounted
    for mount in mounted:
        assert (ROOT / "deploy" / mount.partition(":")[0]).exists(), f"compose mounts {mount}"
    assert compose["networks"]["fleet"]["ipam"]["config"][0]["subnet"] in networks
    for copied in re.findall(r"^COPY ([^\s]+)", dockerfile, re.MULTILINE):
        assert (ROOT / copied).exists(), f"the Dockerfile copies {copied}"


def test_every_fault_of_the_settings_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("server: {port: 99999, prot: 1}\nrouting: {policy: best}\n")

    refused = _run(tmp_path, "serve", "--config", "bad.yaml")

    assert refused.returncode != 0
    for place in ("server.port", "server.prot", "routing.policy"):
        assert place in refused.stderr


def _run(folder: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [WARMPATH, *args], cwd=folder, capture_output=True, text=True, timeout=30, env={**os.environ, **env}
    )


def test_a_signal_has_the_settings_read_again_and_a_dashboard_does_not_hold_up_the_end(tmp_path: Path) -> None:
    config, (port, admin_port) = tmp_path / "warmpath.yaml", free_ports(2)
    key = "wpa-operator-" + "s" * 32
    config.write_text("aliases: {a: one}")
    command = [WARMPATH, "serve", "--config", str(config), "--port", str(port), "--admin-port", str(admin_port)]
    with (
        process(*command, folder=tmp_path, WARMPATH_ADMIN__KEY=key) as running,
        httpx.Client(
            base_url=f"http://127.0.0.1:{admin_port}", headers={"authorization": f"Bearer {key}"}, trust_env=False
        ) as admin,
    ):
        wait_until(lambda: _answers(f"http://127.0.0.1:{admin_port}/health"), 60, "the gateway starts")

        config.write_text("aliases: {a: two}")
        running.send_signal(signal.SIGHUP)
        wait_until(
            lambda: admin.get("/admin/v1/config").json()["aliases"] == {"a": "two"}, 10, "the settings are in force"
        )

        with admin.stream("GET", "/admin/v1/events", timeout=20) as events:
            lines = events.iter_lines()
            assert next(lines) == "event: state"
            running.send_signal(signal.SIGTERM)
            began = time.monotonic()
            for _ in lines:
                pass
        running.wait(10)
        assert running.returncode == 0
        assert time.monotonic() - began < 10, "less than the grace of running answers"
