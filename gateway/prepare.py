"""A valid request → what the router compares: the names of its prompt's blocks. Tokenizes once; the ids travel on.

Pools whose replicas publish a tokenizer are matched by token blocks; all others by chunks of text (`router.text_key`).
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from gateway.openai import ApiError, GenerationRequest
from router import BlockName, Pool, Query, block_names, chunk_names, root_name
from router.prompt import Prompter, PromptError, TokenizerFiles, load_prompter
from router.text_key import canonical_text
from router.wire import encode_ids, pack_ids

__all__ = ["PreparedPrompt", "Preparer", "Prompters"]

_LONG_BODY_BYTES: Final = 8 << 10
"""Above this a never-seen text takes more than about 2 ms to tokenize, and leaves the event loop."""


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    names: list[BlockName]
    num_tokens: int
    """Exact in a token pool, an estimate from bytes in a text pool."""
    ids: str | None
    """base64 of the u32le ids, for own workers; None when the replica renders and tokenizes itself."""
    num_bytes: int = 0
    """Of its canonical text, in a text pool."""

    def query(self, request: GenerationRequest, exclude: frozenset[str] = frozenset()) -> Query:
        """What to ask the router. `exclude`: replicas that were tried already."""
        return Query(
            model=request.model,
            names=self.names,
            num_tokens=self.num_tokens,
            num_bytes=self.num_bytes,
            exclude=exclude,
            streamed=request.stream,
        )


class Prompters:
    """Tokenizers by digest, loaded once, in a thread. Replicas of one model share one."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self._executor = executor
        self._loaded: dict[str, Prompter] = {}

    def get(self, digest: str) -> Prompter | None:
        return self._loaded.get(digest)

    async def load(self, files: TokenizerFiles) -> str:
        """Digest under which the tokenizer can be had from now on. Raises `TokenizerError` for bad files."""
        digest = files.digest
        if digest not in self._loaded:
            loop = asyncio.get_running_loop()
            self._loaded[digest] = await loop.run_in_executor(self._executor, load_prompter, files)
        return digest


class Preparer:
    def __init__(self, prompters: Prompters, executor: ThreadPoolExecutor) -> None:
        self._prompters = prompters
        self._executor = executor

    async def prepare(self, request: GenerationRequest, pool: Pool, salt: str) -> PreparedPrompt:
        """Raises `ApiError` 400 for a prompt that cannot be rendered."""
        if len(request.body) <= _LONG_BODY_BYTES:
            return self._prepare(request, pool, salt)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._prepare, request, pool, salt)

    def _prepare(self, request: GenerationRequest, pool: Pool, salt: str) -> PreparedPrompt:
        root = root_name(model=pool.model, revision=pool.revision, adapter=pool.adapter, salt=salt)
        prompter = self._prompters.get(pool.tokenizer_digest) if pool.key_space == "tokens" else None
        try:
            if prompter is None:
                text = canonical_text(request.fields())
                num_tokens = int(len(text) / pool.bytes_per_token) + 1
                return PreparedPrompt(chunk_names(text, root), num_tokens, ids=None, num_bytes=len(text))
            ids, single = _token_ids(request, prompter)
        except PromptError as error:
            raise ApiError(400, "invalid_prompt", str(error)) from error
        packed = pack_ids(ids)
        names = block_names(packed, root, pool.block_size)
        return PreparedPrompt(names, len(ids), ids=encode_ids(packed) if single else None)


def _token_ids(request: GenerationRequest, prompter: Prompter) -> tuple[Any, bool]:
    """Ids to route by, and whether they are the whole prompt. A body with several prompts is routed by its first."""
    fields = request.fields()
    if request.is_chat:
        return prompter.encode_chat(fields, now=datetime.now(UTC)), True
    prompt = fields["prompt"]
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        first, single = prompt[0], len(prompt) == 1
    else:
        first, single = prompt, True
    if isinstance(first, str):
        return prompter.encode_text(first), single
    if (
        isinstance(first, list)
        and first
        and all(type(token) is int and 0 <= token <= prompter.max_id for token in first)
    ):
        return first, single
    raise PromptError("'prompt' must be a string, a list of strings, a list of token ids or a list of such lists.")
