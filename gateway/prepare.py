"""A valid request → what the router compares: the names of its prompt's blocks. Tokenizes once; the ids travel on.

Pools whose replicas publish a tokenizer are matched by token blocks; all others by chunks of text (`router.text_key`).
What would hold the event loop for longer than `_LOOP_S` is done in a thread; the hop there and back takes 0.1 ms, so the rest
is done where it is.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from gateway.api_error import ApiError
from gateway.openai import GenerationRequest
from router import BlockName, IdTexts, NameCache, Pool, Query, chunk_names, root_name
from router.chat_rules import check_chat
from router.prompt import Prompter, PromptError, Sighting, TokenizerFiles, load_prompter
from router.text_key import canonical_text
from router.wire import pack_ids

__all__ = ["PreparedPrompt", "Preparer", "Prompters", "is_short_text"]

_LOOP_S: Final = 0.0015
"""The longest that a request may hold the event loop here, as far as it can be told beforehand."""
_TEXT_S_PER_BYTE: Final = 3e-9
_TEXT_S_PER_MESSAGE: Final = 4e-6
"""What the text key of a body costs."""
_MOST_CHARS_PER_TOKEN: Final = 4
"""Of prompts that are not tokenized here. Else a first one of one long token would make those after it look short."""
_FITS_BYTES: Final = 8 << 10
"""Whatever is in them: a message takes 24 bytes at least."""
_NAME_CACHE_BYTES: Final = 32 << 20
"""Names of 12 million tokens."""
_ID_TEXT_BYTES: Final = 32 << 20
"""Texts of 3.5 million."""


class PreparedPrompt(msgspec.Struct, frozen=True):
    names: list[BlockName]
    num_tokens: int
    """Exact in a token pool, an estimate from bytes in a text pool."""
    ids: bytes | None
    """base64 of the u32le ids, for own workers; None when the replica renders and tokenizes itself."""
    escape: bool = False
    """Whether special tokens in the texts of messages are text, for a replica that renders them itself."""
    num_bytes: int = 0
    """Of its canonical text, in a text pool."""
    num_prompts: int = 1
    """Of a body with several, each of which is answered; it is routed by its first."""
    total_tokens: int = 0
    """Of all of them: of those after the first an estimate."""

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
    """Tokenizers by digest, loaded once, in a thread of their own. Replicas of one model share one."""

    def __init__(self) -> None:
        self._loaded: dict[str, Prompter] = {}
        self._loading = asyncio.Lock()

    def get(self, digest: str) -> Prompter | None:
        return self._loaded.get(digest)

    def talks(self) -> dict[tuple[str, ...], float]:
        """How many were begun, continued and mistaken, for all models. Any thread may ask."""
        counts = [prompter.talks for prompter in list(self._loaded.values())]
        return {
            ("begun",): sum(each.begun for each in counts),
            ("continued",): sum(each.continued for each in counts),
            ("mistaken",): sum(each.mistaken for each in counts),
        }

    async def load(self, files: TokenizerFiles) -> str:
        """Digest under which the tokenizer can be had from now on. Raises `TokenizerError` for bad files."""
        digest = await asyncio.to_thread(lambda: files.digest)
        async with self._loading:  # the replicas of a model come at once, and bring the same one
            if digest not in self._loaded:
                self._loaded[digest] = await asyncio.to_thread(load_prompter, files)
        return digest


class Preparer:
    def __init__(
        self, prompters: Prompters, executor: ThreadPoolExecutor, escapes: Callable[[str], bool] = lambda model: False
    ) -> None:
        """`escapes`: of which models special tokens in the texts of messages are text."""
        self._prompters = prompters
        self._executor = executor
        self._escapes = escapes
        self._names = NameCache(_NAME_CACHE_BYTES)
        self._id_texts = IdTexts(_ID_TEXT_BYTES)

    def configure(self, escapes: Callable[[str], bool]) -> None:
        """For prompts from now on. Names of blocks are made from ids, so what is known of caches stays true."""
        self._escapes = escapes

    async def prepare(self, request: GenerationRequest, pool: Pool, salt: str) -> PreparedPrompt:
        """Raises `ApiError` 400 for a prompt that cannot be rendered."""
        prepared = self.try_prepare(request, pool, salt)
        if prepared is not None:
            return prepared
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self.prepare_now, request, pool, salt)

    def try_prepare(
        self, request: GenerationRequest, pool: Pool, salt: str, fields: Mapping[str, Any] | None = None
    ) -> PreparedPrompt | None:
        """At once, if that takes little time; None: `prepare`. Raises as that does. `fields`: of a request that
        `is_short_text`.
        """
        if fields is not None or _fits_the_loop(request, self._prompter(pool)):
            return self.prepare_now(request, pool, salt, fields)
        return None

    def prepare_now(
        self, request: GenerationRequest, pool: Pool, salt: str, fields: Mapping[str, Any] | None = None
    ) -> PreparedPrompt:
        """The same, in the caller's thread. Any thread may call it."""
        root = root_name(model=pool.model, revision=pool.revision, adapter=pool.adapter, salt=salt)
        escape = pool.key_space == "tokens" and self._escapes(pool.model)
        prompter = self._prompter(pool)
        if prompter is None:
            return _by_text(fields or request.fields(), pool, root, escape=escape)
        try:
            packed, num_prompts, rest = _packed_ids(request, prompter, escape)
        except PromptError as error:
            raise ApiError(400, error.code, str(error), param=error.param) from error
        names = self._names.names(packed, root, pool.block_size)
        num_tokens = len(packed) // 4
        return PreparedPrompt(
            names,
            num_tokens,
            ids=self._id_texts.encode(packed) if num_prompts == 1 else None,
            escape=escape,
            num_prompts=num_prompts,
            total_tokens=num_tokens + rest,
        )

    def _prompter(self, pool: Pool) -> Prompter | None:
        """None where the pool is matched by text."""
        return self._prompters.get(pool.tokenizer_digest) if pool.key_space == "tokens" else None


def _by_text(fields: Mapping[str, Any], pool: Pool, root: BlockName, *, escape: bool) -> PreparedPrompt:
    text = canonical_text(fields)
    num_bytes = len(text)
    num_tokens = int(num_bytes / pool.bytes_per_token) + 1
    prompt = fields.get("prompt")
    num_prompts = 1 if prompt is None else _prompts(prompt)[0]
    return PreparedPrompt(
        chunk_names(text, root),
        num_tokens,
        ids=None,
        escape=escape,
        num_bytes=num_bytes,
        num_prompts=num_prompts,
        total_tokens=num_tokens,
    )


def _fits_the_loop(request: GenerationRequest, prompter: Prompter | None) -> bool:
    """Whether preparing it will take little time, even if nothing of it was seen before."""
    body = request.body
    if prompter is not None:
        return prompter.seconds(len(body), body.count(b'"role"')) <= _LOOP_S
    return is_short_text(body)


def is_short_text(body: bytes) -> bool:
    """Whether to decode and prepare it as text takes little time."""
    most_messages = (_LOOP_S - len(body) * _TEXT_S_PER_BYTE) / _TEXT_S_PER_MESSAGE
    # Long texts hold few braces, and to count them one by one passes over the rest at the speed of memory.
    return len(body) <= _FITS_BYTES or _has_few_objects(body, most_messages) or body.count(b'"role"') <= most_messages


def _has_few_objects(body: bytes, most: float) -> bool:
    """Whether there are so many at most, each of which may be a message."""
    at = -1
    count = 0
    while count <= most:
        at = body.find(b"{", at + 1)
        if at < 0:
            return True
        count += 1
    return False


def _packed_ids(request: GenerationRequest, prompter: Prompter, escape: bool) -> tuple[bytes, int, int]:
    """Ids of the first prompt as u32le, to route by; how many prompts there are, and about how many tokens those after it have.

    `escape` is for messages: a plain prompt is written by who knows the model's tokens, and means them.
    """
    if request.is_chat:
        return _packed_chat(request, prompter, escape), 1, 0
    fields = request.fields()
    prompt = fields["prompt"]
    is_one = not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int)
    first = prompt if is_one else prompt[0]
    if isinstance(first, str):
        packed = prompter.pack_text(first, fields.get("add_special_tokens") is not False)
    elif (
        isinstance(first, list)
        and first
        and all(type(token) is int and 0 <= token <= prompter.max_id for token in first)
    ):
        packed = pack_ids(first)
    else:
        raise PromptError("'prompt' must be a string, a list of strings, a list of token ids or a list of such lists.")
    num_prompts, rest = _prompts(prompt)
    per_unit = max(len(packed) / 4 / max(len(first), 1), 1 / _MOST_CHARS_PER_TOKEN)
    return packed, num_prompts, math.ceil(rest * per_unit)


def _packed_chat(request: GenerationRequest, prompter: Prompter, escape: bool) -> bytes:
    now = datetime.now(UTC)
    if escape:
        fields = request.fields()
        check_chat(fields)
        return prompter.pack_chat(fields, now, escape=True)
    sighting = prompter.sight_talk(request.messages)
    if (packed := _continued(request, prompter, sighting, now)) is not None:
        return packed
    fields = request.fields()
    check_chat(fields)
    return prompter.begin_talk(sighting, fields, now)


def _continued(request: GenerationRequest, prompter: Prompter, sighting: Sighting, now: datetime) -> bytes | None:
    """Ids of a known talk that goes on; None where all of it must be looked at."""
    if sighting.known is None or (fields := request.fields_behind(sighting.source, len(sighting.known.source))) is None:
        return None
    try:
        check_chat(fields)
        return prompter.continue_talk(sighting, fields, now)
    except PromptError:  # which would count from the first new message
        return None


def _prompts(prompt: object) -> tuple[int, int]:
    """How many there are, and how many characters or ids those after the first have."""
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int):
        return 1, 0
    return len(prompt), sum(len(each) for each in prompt[1:] if isinstance(each, (str, list)))
