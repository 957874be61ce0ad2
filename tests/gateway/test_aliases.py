from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest

from gateway.aliases import Aliases
from gateway.openai import parse_request
from gateway.settings_loader import SettingsError, load_settings
from tests.gateway.stub import DONE, MODEL, USAGE, event, gateway, response, says, streams, stub, writes

BODY = b'{ "messages": [{"role":"user","content":"h\\u00e9llo"}], "model":"gpt-4o" , "x": 1.50, "stream": true}'


def test_a_request_for_an_alias_is_one_for_its_model_and_nothing_else_of_it_changes() -> None:
    asked = parse_request("/v1/chat/completions", BODY, open_access=False)

    meant = Aliases({"gpt-4o": "qwen3-8b"}).resolve(asked)

    assert (meant.model, meant.stream) == ("qwen3-8b", True)
    assert (
        meant.body
        == b'{"messages":[{"role":"user","content":"h\\u00e9llo"}],"model":"qwen3-8b","x":1.50,"stream":true}'
    )


def test_a_request_for_a_model_is_not_touched() -> None:
    asked = parse_request("/v1/chat/completions", BODY.replace(b"gpt-4o", b"qwen3-8b"), open_access=False)

    assert Aliases({"gpt-4o": "qwen3-8b"}).resolve(asked) is asked


@pytest.mark.parametrize("aliases", [{"a": "b", "b": "c"}, {"a": "a"}, {"a": "../b"}, {"a b": "c"}])
def test_an_alias_of_an_alias_or_of_what_no_model_is_called_is_refused(aliases: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match="alias"):
        load_settings(flags={"aliases": aliases})


async def test_clients_use_an_alias_like_a_model(tmp_path: Path) -> None:
    aliases = {"gpt-4o": MODEL, "gpt-4o-mini": MODEL, "nobody-serves-this": "m2"}
    async with stub(says("hi")) as replica, gateway(tmp_path, replica, aliases=aliases) as running:
        answer = await running.chat(model="gpt-4o")
        replica.answer = streams(event("hi"), event("", "stop"), USAGE, DONE)
        streamed = await running.chat(model="gpt-4o-mini", stream=True)
        unserved = await running.chat(model="nobody-serves-this")
        listed = (await running.client.get("/v1/models", headers=running.auth)).json()["data"]
        shown = (await running.client.get("/v1/models/gpt-4o", headers=running.auth)).json()
        admin = (await running.admin.get("/admin/v1/models")).json()["models"]
        decisions = (await running.admin.get("/admin/v1/decisions")).json()["decisions"]

    assert answer.status_code == streamed.status_code == 200
    assert [seen.json["model"] for seen in replica.seen] == [MODEL, MODEL]
    assert unserved.status_code == 404
    assert [model["id"] for model in listed] == [MODEL, "gpt-4o", "gpt-4o-mini"]
    assert (shown["id"], shown["root"]) == ("gpt-4o", MODEL)
    assert {decision["model"] for decision in decisions} == {MODEL}
    assert [(model["model"], model["aliases"], model["replicas"], model["healthy"]) for model in admin] == [
        (MODEL, ["gpt-4o", "gpt-4o-mini"], 1, 1)
    ]
    assert (admin[0]["key_space"], admin[0]["hit_rate"]) == ("text", None)


async def test_an_alias_hides_the_model_of_its_name(tmp_path: Path) -> None:
    async with (
        stub(says("old"), models=["old"]) as old,
        stub(says("new"), models=["new"]) as new,
        gateway(tmp_path, old, new, aliases={"old": "new"}) as running,
    ):
        answer = await running.chat(model="old")
        listed = (await running.client.get("/v1/models", headers=running.auth)).json()["data"]

    assert "new" in answer.text
    assert (len(old.seen), len(new.seen)) == (0, 1)
    assert sorted(model["id"] for model in listed) == ["new", "old"]


async def test_explain_knows_aliases(tmp_path: Path) -> None:
    body = json.dumps({"model": "gpt-4o", "prompt": "x"}).encode()
    async with stub(says("hi")) as replica, gateway(tmp_path, replica, aliases={"gpt-4o": MODEL}) as running:
        found = await running.admin.post(
            "/admin/v1/explain", content=body, headers={"content-type": "application/json"}
        )

    assert found.json()["chosen"] == f"127-0-0-1-{replica.port}"


async def test_the_openai_client_gets_an_answer_for_an_alias(tmp_path: Path) -> None:
    async with stub(says("hi")) as replica, gateway(tmp_path, replica, aliases={"gpt-4o": MODEL}) as running:
        client = openai.AsyncOpenAI(base_url=f"{running.client.base_url}/v1", api_key=running.key, max_retries=0)
        async with client:
            answer = await client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": "x"}])

    assert answer.choices[0].message.content == "hi"


async def test_a_response_that_was_made_by_an_alias_is_found_by_a_key_for_it(tmp_path: Path) -> None:
    made = writes(response(200, b'{"id":"resp_1","object":"response","output":[]}'))
    async with stub(made) as replica, gateway(tmp_path, replica, aliases={"gpt-4o": MODEL}) as running:
        statuses: list[int] = []
        for models in (("gpt-4o",), ("gpt-*",), (MODEL,), ("other",)):
            _, key = await running.gateway.keys.create("client", name=models[0], models=models)
            auth = {"authorization": f"Bearer {key}"}
            if not statuses:
                body = {"model": "gpt-4o", "input": "x"}
                assert (await running.client.post("/v1/responses", json=body, headers=auth)).status_code == 200
            statuses.append((await running.client.get("/v1/responses/resp_1", headers=auth)).status_code)

    assert statuses == [200, 200, 200, 404]


async def test_a_key_is_held_to_the_name_that_it_asks_for(tmp_path: Path) -> None:
    async with stub(says("hi")) as replica, gateway(tmp_path, replica, aliases={"gpt-4o": MODEL}) as running:
        _, running.key = await running.gateway.keys.create("client", name="few", models=("gpt-4o",))
        by_alias = await running.chat(model="gpt-4o")
        by_name = await running.chat(model=MODEL)
        listed = (await running.client.get("/v1/models", headers=running.auth)).json()["data"]

    assert by_alias.status_code == 200
    assert (by_name.status_code, by_name.json()["error"]["code"]) == (404, "model_not_found")
    assert [model["id"] for model in listed] == ["gpt-4o"]
