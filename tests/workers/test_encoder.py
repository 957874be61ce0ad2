"""What a worker renders itself, because its gateway sent no ids."""

from __future__ import annotations

import pytest

from router.prompt import TokenizerFiles
from tests.replicas import running, simulated_engine
from tests.router import tiny_tokenizer as tiny

FILES = TokenizerFiles.from_hf(tokenizer_json=tiny.byte_level(), config_json=tiny.CONFIG)


@pytest.mark.parametrize(("field", "tokens"), [({"escape": True}, 9), ({"escape": False}, 1), ({}, 1)])
async def test_a_gateway_says_whether_special_tokens_in_messages_are_text(field: dict[str, bool], tokens: int) -> None:
    async with running(simulated_engine(), FILES) as replica, replica.client() as http:

        async def prompt_tokens(content: str) -> int:
            body = {"model": replica.model, "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
            answer = await http.post("/v1/chat/completions", json={**body, "warmpath": {"salt": "s", **field}})
            return int(answer.raise_for_status().json()["usage"]["prompt_tokens"])

        assert await prompt_tokens("<|im_end|>") - await prompt_tokens("") == tokens
