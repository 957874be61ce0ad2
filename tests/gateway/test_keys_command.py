"""`warmpath keys` against a gateway over a real socket."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from click.testing import CliRunner, Result

from gateway.cli import main
from tests.gateway.stub import Running, gateway
from tests.replicas import in_a_thread


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with in_a_thread(lambda: gateway(tmp_path_factory.mktemp("state"))) as running:
        yield running


def keys(running: Running, *args: str) -> Result:
    admin_key = running.admin.headers["authorization"].removeprefix("Bearer ")
    where = {"WARMPATH_ADMIN_URL": str(running.admin.base_url), "WARMPATH_ADMIN_KEY": admin_key}
    return CliRunner(env=where).invoke(main, ["keys", *args])


def told(running: Running, *args: str) -> str:
    result = keys(running, *args)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_key_from_its_making_to_its_end(running: Running) -> None:
    text = told(
        running, "create", "--name", "ci", "--tenant", "search", "--model", "qwen[23]*", "--scope", "chat", "--rpm", "60",
        "--limit", "usd_per_day=2.5", "--expires-in", "30d",
    ).strip()  # fmt: skip
    key_id = text.split("-")[1]

    listed = told(running, "list")
    told(running, "patch", key_id, "--limit", "usd_per_day=none", "--all-models", "--debug")
    shown = msgspec.json.decode(told(running, "show", key_id, "--json"))
    new = told(running, "rotate", key_id, "--overlap", "0s").strip()
    assert told(running, "revoke", new.split("-")[1]) == f"{new.split('-')[1]} revoked\n"

    (row,) = [line for line in listed.splitlines() if line.strip().startswith(key_id)]
    assert row.split()[:6] == [key_id, "client", "ci", "search", "search", "chat"]
    assert "qwen[23]*" in row
    assert "60 requests/min, 2.5 USD/day" in row
    assert text.rsplit("-", 1)[1] not in listed
    assert (shown["limits"]["requests_per_minute"], shown["limits"]["usd_per_day"]) == (60, None)
    assert (shown["models"], shown["scopes"], shown["debug"]) == ([], ["chat"], True)
    assert key_id not in told(running, "list")
    everything = told(running, "list", "--all")
    assert "expired" in everything
    assert "revoked" in everything


def test_an_expiry_can_be_taken_away(running: Running) -> None:
    key_id = told(running, "create", "--name", "b", "--expires-in", "1h").split("-")[1]

    assert "never" in told(running, "patch", key_id, "--never-expires")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("create", "--name", "x", "--limit", "requests=1"), "is none of requests_per_minute"),
        (("create", "--name", "x", "--limit", "tokens_per_day=many"), "'many' is no number"),
        (("create", "--name", "x", "--expires-in", "soon"), "is no duration such as"),
        (("create", "--name", "x", "--scope", "all"), "400: Invalid request"),
        (("show", "nobody"), "404: There is no such key."),
        (("revoke", "../replicas"), "404"),
    ],
)
def test_what_cannot_be_done_is_one_line(running: Running, args: tuple[str, ...], message: str) -> None:
    result = keys(running, *args)

    assert result.exit_code != 0
    assert message in result.output
