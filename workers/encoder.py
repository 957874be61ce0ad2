"""Text → token ids, off the event loop when that takes long, as may other work for a request. Errors of a prompt become the
client's 400.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from datetime import UTC, datetime
from typing import Final, TypeVar

from router.prompt import Prompter, PromptError
from router.wire import pack_ids
from workers.api_error import ApiError
from workers.prompts import Prompt, chat_fields

__all__ = ["Encoder"]

LONG_TEXT_BYTES: Final = 8 << 10
"""Text that was never seen takes 0.3 ms a KB: a longer one would hold the event loop for over 2 ms."""

_T = TypeVar("_T")


class Encoder:
    """Ids come packed (`router.wire.pack_ids`), the form that the engine takes. All methods raise `ApiError` 400."""

    def __init__(self, prompter: Prompter, executor: Executor) -> None:
        self.prompter = prompter
        self._executor = executor

    async def encode_chat(self, body: bytes, *, escape: bool = False) -> bytes:
        """The rendered messages of a chat request. `escape`: special tokens in their texts are text."""
        return await self.run(len(body), lambda: self._encode_chat(body, escape))

    async def encode_prompts(self, prompts: Sequence[Prompt], *, add_special_tokens: bool) -> list[bytes]:
        """One piece of work: many short prompts take as long as a long one."""

        def encode(prompt: Prompt) -> bytes:
            return self.prompter.pack_text(prompt, add_special_tokens) if isinstance(prompt, str) else pack_ids(prompt)

        size = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        return await self.run(size, lambda: list(map(encode, prompts)))

    async def decode(self, ids: Sequence[int]) -> str:
        """The text with its special tokens, so that encoding it again gives the ids."""
        return await self.run(4 * len(ids), lambda: self.prompter.decode(ids, skip_special_tokens=False))

    async def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Each token alone: U+FFFD stands for the part of a character."""
        token_bytes = self.prompter.token_bytes
        return await self.run(4 * len(ids), lambda: [token_bytes(id_).decode(errors="replace") for id_ in ids])

    async def run(self, size: int, work: Callable[[], _T]) -> _T:
        """Do `work` here, or in a thread when it is about more than some bytes."""
        try:
            return work() if size <= LONG_TEXT_BYTES else await self.in_thread(work)
        except PromptError as error:
            raise ApiError(400, "invalid_prompt", str(error)) from error

    async def in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _encode_chat(self, body: bytes, escape: bool) -> bytes:
        # The date that a template may write is UTC's, as it is at the gateway: the same talk gives the same ids at both.
        return self.prompter.pack_chat(chat_fields(body), datetime.now(UTC), escape=escape)
