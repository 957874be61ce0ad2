from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from gateway.api_error import ApiError
from gateway.openai import Endpoint, GenerationRequest, parse_request
from gateway.prepare import PreparedPrompt, Preparer, Prompters
from router import Pool, block_names, root_name
from router.prompt import TokenizerFiles, load_prompter
from router.wire import unpack_ids
from tests.router import tiny_tokenizer as tiny

FILES = TokenizerFiles(kind="trivial")
TOKENS = Pool(model="m", revision="r", key_space="tokens", created=0.0, block_size=16, tokenizer_digest=FILES.digest)
TEXT = Pool(model="m", revision="", key_space="text", created=0.0, block_size=64)


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def request(endpoint: Endpoint = "/v1/chat/completions", **fields: object) -> GenerationRequest:
    return parse_request(endpoint, msgspec.json.encode({"model": "m", **fields}), open_access=False)


async def prepare(
    executor: ThreadPoolExecutor, wanted: GenerationRequest, pool: Pool, salt: str = "s"
) -> PreparedPrompt:
    prompters = Prompters()
    await prompters.load(FILES)
    return await Preparer(prompters, executor).prepare(wanted, pool, salt)


def ids_of(prompt: PreparedPrompt) -> list[int]:
    assert prompt.ids is not None
    return list(unpack_ids(base64.b64decode(prompt.ids)))


@pytest.mark.parametrize("size", [10, 200_000], ids=["on the loop", "in the thread"])
async def test_a_chat_is_rendered_tokenized_and_named_once(executor: ThreadPoolExecutor, size: int) -> None:
    wanted = request(messages=[{"role": "user", "content": "x" * size}])

    prompt = await prepare(executor, wanted, TOKENS)

    ids = ids_of(prompt)
    assert load_prompter(FILES).decode(ids, skip_special_tokens=False).count("x") == size
    assert prompt.num_tokens == len(ids)
    assert prompt.names == block_names(base64.b64decode(prompt.ids or ""), root_name(model="m", revision="r", salt="s"))


async def test_the_salt_separates_names(executor: ThreadPoolExecutor) -> None:
    wanted = request("/v1/completions", prompt="a" * 640)

    one, other = [await prepare(executor, wanted, TOKENS, salt) for salt in ("a", "b")]

    assert one.ids == other.ids
    assert not set(one.names) & set(other.names)


async def test_every_form_of_one_prompt_is_the_same_prompt(executor: ThreadPoolExecutor) -> None:
    text = await prepare(executor, request("/v1/completions", prompt="hello you"), TOKENS)
    ids = ids_of(text)

    for prompt in (["hello you"], ids, [ids]):
        assert await prepare(executor, request("/v1/completions", prompt=prompt), TOKENS) == text


async def test_a_plain_prompt_gets_special_tokens_unless_it_says_not(executor: ThreadPoolExecutor) -> None:
    files = TokenizerFiles.from_hf(tokenizer_json=tiny.byte_level_framed(), config_json=tiny.CONFIG)
    prompters = Prompters()
    pool = dataclasses.replace(TOKENS, tokenizer_digest=await prompters.load(files))
    preparer = Preparer(prompters, executor)

    for wanted in (True, None, False):
        fields = {"prompt": "the fox", "add_special_tokens": wanted}
        prompt = await preparer.prepare(request("/v1/completions", **fields), pool, "s")
        assert ids_of(prompt) == load_prompter(files).encode_text("the fox", wanted is not False).tolist()


@pytest.mark.parametrize("escape", [True, False])
async def test_special_tokens_in_messages_are_text_where_the_model_wants_it(
    executor: ThreadPoolExecutor, escape: bool
) -> None:
    files = TokenizerFiles.from_hf(tokenizer_json=tiny.byte_level(), config_json=tiny.CONFIG)
    prompters = Prompters()
    pool = dataclasses.replace(TOKENS, tokenizer_digest=await prompters.load(files))
    preparer = Preparer(prompters, executor, lambda model: escape and model == pool.model)
    chat = request(messages=[{"role": "user", "content": "<|im_end|>"}])

    prompt = await preparer.prepare(chat, pool, "s")
    plain = await preparer.prepare(request("/v1/completions", prompt="<|im_end|>"), pool, "s")

    end = load_prompter(files).encode_text("<|im_end|>").tolist()
    assert prompt.escape == escape
    assert ids_of(prompt).count(end[0]) == (1 if escape else 2)
    assert ids_of(plain) == end  # who writes a plain prompt means its tokens


LONG = "the quick brown fox " * 60


def talk(turns: int, *more: object) -> dict[str, Any]:
    said = [{"role": ("user", "assistant")[turn % 2], "content": f"{turn} {LONG}"} for turn in range(turns)]
    return {"messages": [*said, *more]}


@pytest.fixture
async def warm(executor: ThreadPoolExecutor) -> tuple[Preparer, Preparer, Pool]:
    """Two that know nothing; the second will never know anything."""
    files = TokenizerFiles.from_hf(tokenizer_json=tiny.byte_level(), config_json=tiny.CONFIG)
    prompters, forgetful = Prompters(), Prompters()
    pool = dataclasses.replace(TOKENS, tokenizer_digest=await prompters.load(files))
    await forgetful.load(files)
    prompter = forgetful.get(files.digest)
    assert prompter is not None
    prompter._talks.trusted = False
    return Preparer(prompters, executor), Preparer(forgetful, executor), pool


def test_a_talk_that_goes_on_is_prepared_as_if_it_were_new(
    warm: tuple[Preparer, Preparer, Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    remembering, forgetful, pool = warm
    for turns in range(1, 12, 2):
        wanted = request(**talk(turns))
        if turns > 5:
            monkeypatch.setattr(GenerationRequest, "fields", pytest.fail)

        prompt = remembering.prepare_now(wanted, pool, "s")

        monkeypatch.undo()
        assert prompt == forgetful.prepare_now(wanted, pool, "s")


@pytest.mark.parametrize(
    "body",
    [
        talk(8, {"role": "robot", "content": "x"}),
        talk(8, {"role": "user", "content": 5}),
        talk(8, {"role": "user"}),
        talk(8, {"role": "user", "content": [{"type": "image_url"}]}),
        talk(8, *({"role": "user", "content": "x"},) * 2048),
        talk(8, {"role": "user", "content": [{"type": "text", "text": "x"}] * 2048}),
        {**talk(8), "tools": 5},
        {**talk(8), "add_generation_prompt": 5},
        {**talk(8), "chat_template_kwargs": {"tokenize": False}},
        {**talk(8), "continue_final_message": True, "add_generation_prompt": True},
        {**talk(8), "x": 1 << 70},
    ],
)
def test_what_is_wrong_behind_what_is_known_is_refused_in_the_same_words(
    warm: tuple[Preparer, Preparer, Pool], body: dict[str, Any]
) -> None:
    remembering, forgetful, pool = warm
    for turns in (3, 5, 7):
        remembering.prepare_now(request(**talk(turns)), pool, "s")
    wanted = parse_request("/v1/chat/completions", json.dumps({"model": "m", **body}).encode(), open_access=False)

    with pytest.raises(ApiError) as expected:
        forgetful.prepare_now(wanted, pool, "s")
    with pytest.raises(ApiError) as caught:
        remembering.prepare_now(wanted, pool, "s")

    assert vars(caught.value) == vars(expected.value)


async def test_a_replica_that_renders_itself_is_told_to_escape(executor: ThreadPoolExecutor) -> None:
    """Before its tokenizer is loaded here, say."""
    preparer = Preparer(Prompters(), executor, lambda model: True)
    chat = request(messages=[{"role": "user", "content": "x"}])

    unknown = await preparer.prepare(chat, TOKENS, "s")
    foreign = await preparer.prepare(chat, TEXT, "s")

    assert (unknown.ids, unknown.escape) == (None, True)
    assert (foreign.ids, foreign.escape) == (None, False)


async def test_replicas_that_come_at_once_load_their_tokenizer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[TokenizerFiles] = []

    def load(files: TokenizerFiles) -> object:
        loads.append(files)
        return load_prompter(files)

    monkeypatch.setattr("gateway.prepare.load_prompter", load)
    prompters = Prompters()

    await asyncio.gather(*(prompters.load(FILES) for _ in range(5)))

    assert loads == [FILES]


@pytest.mark.parametrize("messages", [1, 2000])
async def test_what_would_hold_the_loop_for_long_is_done_in_a_thread(
    messages: int, executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompters = Prompters()
    await prompters.load(FILES)
    preparer = Preparer(prompters, executor)
    threads: set[str] = set()
    prepare_now = preparer.prepare_now

    def watched(*args: Any) -> PreparedPrompt:
        threads.add(threading.current_thread().name)
        return prepare_now(*args)

    monkeypatch.setattr(preparer, "prepare_now", watched)
    await preparer.prepare(request(messages=[{"role": "user", "content": "x"}] * messages), TOKENS, "s")

    assert (threads == {threading.current_thread().name}) == (messages == 1)


@pytest.mark.parametrize("pool", [TEXT, TOKENS], ids=["text", "tokens"])
async def test_what_takes_little_time_is_prepared_without_waiting(executor: ThreadPoolExecutor, pool: Pool) -> None:
    prompters = Prompters()
    await prompters.load(FILES)
    preparer = Preparer(prompters, executor)
    short, long = (request(messages=[{"role": "user", "content": "x"}] * number) for number in (1, 2_000))

    assert preparer.try_prepare(short, pool, "s") == await preparer.prepare(short, pool, "s")
    assert preparer.try_prepare(long, pool, "s") is None


async def test_several_prompts_are_routed_by_the_first_and_tokenized_by_the_replica(
    executor: ThreadPoolExecutor,
) -> None:
    prompt = await prepare(executor, request("/v1/completions", prompt=["a" * 64, "b"]), TOKENS)

    assert prompt.ids is None
    assert len(prompt.names) == 1


@pytest.mark.parametrize("prompt", [[], [[]], {}, 5, None, [True], [1, "a"], [-1], [1 << 40], [1.5], [["a"]]])
async def test_what_is_no_prompt_is_a_400(executor: ThreadPoolExecutor, prompt: object) -> None:
    with pytest.raises(ApiError) as caught:
        await prepare(executor, request("/v1/completions", prompt=prompt), TOKENS)

    assert caught.value.status == 400


async def test_without_a_tokenizer_a_talk_continues_the_names_of_its_past(executor: ThreadPoolExecutor) -> None:
    talk = [{"role": "user", "content": "tell me of the sea. " * 40}]
    longer = [*talk, {"role": "assistant", "content": "It is wide."}, {"role": "user", "content": "And then?"}]

    before = await prepare(executor, request(messages=talk), TEXT)
    after = await prepare(executor, request(messages=longer), TEXT)

    assert before.ids is None
    assert len(before.names) > 2
    assert after.names[: len(before.names)] == before.names


@pytest.mark.parametrize(
    ("prompt", "num_prompts", "total_tokens"),
    [
        ("x" * 40, 1, 10),
        ([1, 2, 3], 1, 3),
        (["x" * 40, "x" * 80], 2, 30),
        (["", "x" * 80, "x" * 4], 3, 21),
        ([[1, 2], [3, 4, 5]], 2, 5),
    ],
)
async def test_all_prompts_of_a_body_are_counted_for_its_limits(
    executor: ThreadPoolExecutor, prompt: Any, num_prompts: int, total_tokens: int
) -> None:
    wanted = request("/v1/completions", prompt=prompt)

    prepared = await prepare(executor, wanted, TOKENS)

    assert (prepared.num_prompts, prepared.total_tokens) == (num_prompts, total_tokens)
    assert (await prepare(executor, wanted, TEXT)).num_prompts == num_prompts
