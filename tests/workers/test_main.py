"""The command line, as real processes where that is what it is about."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
from click.testing import CliRunner

from tests.default_model import default_model
from tests.workers.gguf_writing import write_metadata
from tests.workers.test_hub import publish
from tests.workers.tiny_models import VOCAB, make_hf
from workers.__main__ import _serve_command, parse_size

QUIET = {"WARMPATH_JOIN_TOKEN": "", "PYTHONWARNINGS": "error"}


@contextlib.contextmanager
def worker(*args: str, env: Mapping[str, str] = QUIET) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "workers", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    running, listening = process.stdout.readline(), process.stdout.readline()
    assert running.startswith("running "), running
    assert listening.startswith("listening on "), listening
    return listening.removeprefix("listening on ").strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_simulated_replica_starts_answers_and_stops(number: signal.Signals) -> None:
    with worker("simulated", "--speedup", "100", "--served-model-name", "tiny") as process:
        url = url_of(process)
        answer = httpx.post(
            f"{url}/v1/completions", json={"model": "tiny", "prompt": "hello", "max_tokens": 4}, trust_env=False
        )
        process.send_signal(number)
        began = time.monotonic()
        _, log = process.communicate(timeout=60)

    assert answer.status_code == 200
    assert process.returncode == 0
    assert time.monotonic() - began < 8, "nothing was running: no grace is needed"
    assert "Traceback" not in log


def _cached_tokens(url: str) -> int:
    body = {"model": "simulated", "prompt": "the same words " * 20, "max_tokens": 1}
    usage = httpx.post(f"{url}/v1/completions", json=body, trust_env=False).raise_for_status().json()["usage"]
    cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    return cached


def test_simulated_replicas_in_one_process_have_each_their_own_cache_and_registration() -> None:
    registered: dict[str, Any] = {}

    class Gateway(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            registered[self.path] = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with (
        ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as gateway,
        worker(
            *("simulated", "--replicas", "3", "--speedup", "100", "--replica-id", "sim", "--join-token", "x"),
            *("--gateway", f"http://127.0.0.1:{gateway.server_port}"),
        ) as process,
    ):
        threading.Thread(target=gateway.serve_forever, daemon=True).start()
        assert process.stdout is not None
        urls = [url_of(process), *(process.stdout.readline().split()[-1] for _ in range(2))]
        cached = [[_cached_tokens(url) for _ in range(2)] for url in urls]
        deadline = time.monotonic() + 5
        while len(registered) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        process.terminate()
        process.communicate(timeout=60)
        gateway.shutdown()

    assert process.returncode == 0
    assert cached == [[0, 64]] * 3
    assert sorted(registered) == [f"/admin/v1/replicas/sim-{number}" for number in range(3)]
    assert sorted(spec["url"] for spec in registered.values()) == sorted(urls)
    assert len({spec["epoch"] for spec in registered.values()}) == 3


def test_a_simulated_replica_needs_no_engine_packages() -> None:
    code = (
        "import sys, runpy\n"
        "for name in ('torch', 'gguf', 'numpy', 'safetensors', 'huggingface_hub', 'tokenizers', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        "sys.argv = ['workers', 'simulated']\n"
        "runpy.run_module('workers', run_name='__main__', alter_sys=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert httpx.get(f"{url_of(process)}/health", trust_env=False).status_code == 200
        finally:
            process.terminate()


def test_a_taken_port_is_one_clear_line() -> None:
    with worker("simulated") as first:
        port = url_of(first).rpartition(":")[2]
        with worker("simulated", "--port", port) as second:
            _, log = second.communicate(timeout=60)
        first.terminate()

    assert second.returncode == 1
    assert log.strip().splitlines() == [f"Error: cannot listen on 127.0.0.1:{port}: Address already in use"]


def test_a_model_that_cannot_be_had_is_one_clear_line(tmp_path: Path) -> None:
    for args in (["no/such/model.gguf"], ["fetch", "no/such/model.gguf"], ["no/such/model.gguf", "--plan-only"]):
        with worker(*args, env={**QUIET, "WARMPATH_CACHE": str(tmp_path)}) as process:
            out, log = process.communicate(timeout=30)

        assert process.returncode == 1
        assert out == ""
        (line,) = log.strip().splitlines()
        assert line.startswith("Error: ")
        assert "no/such/model.gguf" in line


def last_line_of(folder: Path, *options: str) -> str:
    with worker(str(folder), "--kv-memory", "1MiB", "--precision", "fp32", *options) as process:
        out, log = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out == ""
    assert "Traceback" not in log
    return log.strip().splitlines()[-1]


def test_a_model_that_cannot_be_served_ends_the_start_with_one_clear_line(tmp_path: Path) -> None:
    make_hf().save_pretrained(tmp_path)
    tokens = {"a": 0, "b": VOCAB}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "model": {"type": "WordLevel", "vocab": tokens, "unk_token": "a"}})
    )

    assert last_line_of(tmp_path) == (
        "Error: the tokenizer has ids up to 96, the model's embedding ends at 95: they do not belong together"
    )

    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:-1])
    assert "model.safetensors is damaged or truncated" in last_line_of(tmp_path)

    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert last_line_of(tmp_path, "--plan-only").startswith("Error: models of type 'gpt2' are not implemented")


def test_a_gguf_file_that_cannot_be_served_ends_the_start_with_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"

    write_metadata(path, {"tokenizer.ggml.model": "gpt2"})
    assert last_line_of(path).startswith("Error: the file has no vocabulary")

    path.write_bytes(path.read_bytes().replace(b"llama", b"mamba"))
    assert last_line_of(path, "--plan-only").startswith("Error: GGUF models of type 'mamba' are not implemented")

    path.write_bytes(path.read_bytes()[:60])
    assert last_line_of(path).startswith(f"Error: {path} is truncated")


@pytest.mark.model
def test_a_file_that_ends_within_its_weights_ends_the_start_with_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    with default_model().open("rb") as whole, path.open("wb") as cut:
        cut.write(whole.read(60_000_000))

    line = last_line_of(path, "--kv-memory", "64MiB")

    assert line.startswith(f"Error: {path} is truncated: 60000000 bytes, tensor ")


def test_a_default_model_with_another_hash_ends_the_start_with_one_clear_line(tmp_path: Path) -> None:
    publish(tmp_path, b"GGUF of somebody else")
    where = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "WARMPATH_CACHE": str(tmp_path / "cache")}

    with worker("default", env=where) as process:  # not QUIET: pip has warnings of its own
        out, log = process.communicate(timeout=60)

    assert process.returncode == 1
    assert out == ""
    assert "Traceback" not in log
    assert re.fullmatch(r"Error: \S+\.gguf has SHA-256 \w{64}, not \w{64}; it is not used", log.splitlines()[-1])


@pytest.mark.parametrize(
    ("args", "fault"),
    [
        (["--gateway", "http://127.0.0.1:1"], "--join-token"),
        (["--gateway", "127.0.0.1:1", "--join-token", "x"], "no URL"),
        (["--gateway", "http://[::1", "--join-token", "x"], "no URL"),
        (["--gateway", "http://h:abc", "--join-token", "x"], "no URL"),
        (["--gateway", "http://h/?a=b", "--join-token", "x"], "no URL"),
        (["--gateway", "http://h:1", "--join-token", "é"], "--join-token"),
        (["--replica-id", "../../x"], "--replica-id"),
        (["--grace", "nan"], "--grace"),
        (["--speedup", "inf"], "--speedup"),
        (["--max-model-len", "1"], "max-model-len"),
        (["--advertise", "worker-0"], "no URL"),
        (["--credential", "has space"], "--credential"),
        (["--credential", ""], "--credential"),
        (["--kv-memory", "much"], "no size"),
        (["--kv-memory", "1KiB"], "holds no block"),
        (["--port", "70000"], "70000"),
        (["--speedup", "0"], "speedup"),
        (["--precision", "int3"], "int3"),
        (["--unknown"], "--unknown"),
        (["--replicas", "0"], "replicas"),
        (["--replicas", "2", "--advertise", "http://host:1"], "--advertise"),
        (["--replicas", "2", "--port", "65535"], "no ports"),
        (["--preset", "abacus"], "abacus"),
        (["--jitter", "1"], "jitter"),
        (["--jitter", "nan"], "--jitter"),
        (["--decode-ms", "0"], "decode-ms"),
        (["--kv-tokens", "1024", "--kv-memory", "1GiB"], "two units"),
        (["--fault", "explode"], "is no fault"),
        (["--fault", "1/hang"], "there are 1"),
    ],
)
def test_a_wrong_option_is_a_usage_error(args: list[str], fault: str) -> None:
    result = CliRunner().invoke(_serve_command, ["simulated", *args], env=QUIET)

    assert result.exit_code == 2
    assert fault in result.output


def test_an_option_of_simulated_replicas_is_refused_for_others() -> None:
    result = CliRunner().invoke(_serve_command, ["./model", "--speedup", "2"], env=QUIET)

    assert result.exit_code == 2
    assert "--speedup is for simulated replicas" in result.output


def test_the_parameters_of_the_command_line_change_those_of_the_preset() -> None:
    with worker(
        *("simulated", "--preset", "smg", "--prefill-ms", "30", "--prefill-token-ms", "0.1", "--decode-ms", "1"),
        *("--decode-free", "4", "--decode-row", "0.5", "--jitter", "0.1", "--seed", "7", "--kv-tokens", "4096"),
        *("--replicas", "2", "--credential", "secret", "--fault", "1/503:1", "--fault", "die:2"),
    ) as process:
        assert process.stdout is not None
        running, *urls = [process.stdout.readline().split()[-1] for _ in range(3)]
        assert running == "once"
        with httpx.Client(headers={"authorization": "Bearer secret"}, trust_env=False) as http:
            models = [http.get(f"{url}/v1/models").json()["data"][0] for url in urls]
            body = {"prompt": "hello", "max_tokens": 2}
            statuses = [http.post(f"{url}/v1/completions", json=body).status_code for url in urls]
            with pytest.raises(httpx.TransportError):
                http.post(f"{urls[0]}/v1/completions", json=body)
        _, log = process.communicate(timeout=60)

    assert [model["max_model_len"] for model in models] == [4096, 4096]
    assert statuses == [200, 503]
    assert process.returncode == 70, "a process that died on request says so"
    assert "Traceback" not in log


def test_help_ends_with_examples() -> None:
    result = CliRunner().invoke(_serve_command, ["--help"])

    assert result.output.rstrip().splitlines()[-1].strip() == "python -m workers fetch default"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 << 20),
        ("2GiB", 2 << 30),
        ("2gb", 2 * 10**9),
        ("100", 100),
        ("1.5 GiB", 3 << 29),
        ("64KiB", 1 << 16),
    ],
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "MiB", "5 apples", "1e9", "0x10"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        parse_size(text)
