"""Clients as people have them, unchanged but for base URL and key, each with its packages in an environment of its own.

Making those environments takes minutes and 1 GB, so it is asked for: ``WARMPATH_TESTS_CLIENTS=1``. They are kept beside the
models. curl and the official SDK that the tests have anyway are tried always.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.processes import Up, running_up
from workers.hub import cache_dir

pytestmark = pytest.mark.system

SCRIPTS = Path(__file__).parent / "scripts"

PYTHON_CLIENTS = {
    "openai-python 2": ("openai_python.py", ["openai==2.*"]),
    "openai-python 3": ("openai_python.py", ["openai==3.*"]),
    "langchain-openai": ("langchain_chat.py", ["langchain-openai>=1"]),
    "litellm": ("litellm_sdk.py", ["litellm>=1.80"]),
    "llm": ("llm_command.py", ["llm>=0.30"]),
}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with running_up(tmp_path_factory.mktemp("clients"), "--model", "simulated", "--workers", "2") as system:
        yield system


def environment_of(up: Up) -> dict[str, str]:
    return {**os.environ, "OPENAI_BASE_URL": up.base_url, "OPENAI_API_KEY": up.api_key, "MODEL": up.model}


def asked_for() -> None:
    if not os.environ.get("WARMPATH_TESTS_CLIENTS"):
        pytest.skip("set WARMPATH_TESTS_CLIENTS=1 to install this client (minutes, and 1 GB for all)")


def python_of(packages: list[str]) -> Path:
    """The interpreter of an environment that holds `packages`."""
    folder = cache_dir(os.environ).parent / "clients" / hashlib.sha256("\n".join(packages).encode()).hexdigest()[:16]
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages], check=True)
        (folder / "complete").touch()
    return python


def run(command: list[str | Path], up: Up, cwd: Path | None = None) -> Any:
    done = subprocess.run(
        command, env=environment_of(up), cwd=cwd, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(seen: dict[str, Any], up: Up) -> None:
    """The same talk has the same text, streamed or not, and what every client shows is right."""
    assert seen["text"]
    assert seen["stream"]["text"] == seen["text"]
    for name, expected in {
        "models": [up.model],
        "model": up.model,
        "usage": 8,
        "finish": "length",
        "completion": True,
        "concurrently": 8,
        "batch": 3,
    }.items():
        assert seen.get(name, expected) == expected, name
    assert seen.get("request_id", "req-").startswith("req-")
    assert isinstance(seen.get("cached", 0), int)


def check_official(seen: dict[str, Any], up: Up) -> None:
    check(seen, up)
    assert seen["stream"] == {"text": seen["text"], "finish": ["length"], "usage": None}
    assert seen["stream_with_usage"] == {"text": seen["text"], "finish": ["length"], "usage": 8}
    assert seen["no_model"] == ["NotFoundError", 404, "model_not_found", "model", True]
    assert seen["bad_value"][:2] == ["BadRequestError", 400]
    assert seen["bad_value"][3:] == ["temperature", True]
    assert seen["bad_key"] == ["AuthenticationError", 401, "invalid_api_key", None, True]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PYTHON_CLIENTS)
def test_python_clients(up: Up, name: str) -> None:
    asked_for()
    script, packages = PYTHON_CLIENTS[name]

    seen = run([python_of(packages), SCRIPTS / script], up)

    (check_official if script == "openai_python.py" else check)(seen, up)


@pytest.mark.timeout(900)
def test_openai_node(up: Up) -> None:
    asked_for()
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = cache_dir(os.environ).parent / "clients" / "node"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "node_modules" / "openai").exists():
        subprocess.run(["npm", "install", "--silent", "--no-fund", "--no-audit", "openai@7"], cwd=folder, check=True)
    script = shutil.copy(SCRIPTS / "openai_node.mjs", folder)

    check_official(run(["node", script], up, cwd=folder), up)


def test_the_official_sdk_of_these_tests(up: Up) -> None:
    check_official(run([Path(sys.executable), SCRIPTS / "openai_python.py"], up), up)


def curl(up: Up, *arguments: str) -> str:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    command = ["curl", "-sS", "--max-time", "20", *arguments, "-H", f"Authorization: Bearer {up.api_key}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_curl(up: Up) -> None:
    body = {
        "model": up.model,
        "messages": [{"role": "user", "content": "Say a few words."}],
        "max_tokens": 8,
        "seed": 1,
    }
    url, kind = f"{up.base_url}/chat/completions", ("-H", "Content-Type: application/json")

    whole = json.loads(curl(up, url, *kind, "-d", json.dumps(body)))
    bare = json.loads(curl(up, url, *kind, "-H", "User-Agent:", "-H", "Accept:", "-d", json.dumps(body)))
    http_1_0 = json.loads(curl(up, "--http1.0", url, *kind, "-d", json.dumps(body)))
    h2c = json.loads(curl(up, "--http2", url, *kind, "-d", json.dumps(body)))
    events = curl(up, "--http1.0", "-N", url, *kind, "-d", json.dumps({**body, "stream": True})).split("\n\n")

    assert whole["choices"] == bare["choices"] == http_1_0["choices"] == h2c["choices"]
    assert events[-2:] == ["data: [DONE]", ""]
    data = [line[6:] for event in events[:-2] for line in event.split("\n") if line.startswith("data: ")]
    pieces = [choice["delta"].get("content", "") for chunk in map(json.loads, data) for choice in chunk["choices"]]
    assert "".join(pieces) == whole["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    "fields",
    [
        # guidellm: completions and chat
        {"prompt": "Once", "max_tokens": 4, "stop": None, "ignore_eos": True},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "max_completion_tokens": 4},
        # vllm bench serve
        {"prompt": "Once", "max_tokens": 4, "temperature": 0.0, "repetition_penalty": 1.0, "logprobs": None},
        {"prompt": [40, 41, 42], "max_tokens": 4},
        {"prompt": ["Once", "Twice"], "max_tokens": 4},
    ],
)
def test_request_forms_of_load_generators(up: Up, fields: dict[str, Any]) -> None:
    endpoint = "chat/completions" if "messages" in fields else "completions"
    options = {"include_usage": True, "continuous_usage_stats": True}
    for extra in ({}, {"stream": True, "stream_options": options}):
        answer = httpx.post(
            f"{up.base_url}/{endpoint}",
            json={"model": up.model, **fields, **extra},
            headers={"authorization": f"Bearer {up.api_key}"},
            timeout=30,
        )

        assert answer.status_code == 200, answer.text
        assert '"completion_tokens":' in answer.text
