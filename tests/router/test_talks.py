"""Talks that go on: the same as rendered whole, whatever was seen before, for every template."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import cache
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.chat import Chat
from router.prompt import Prompter
from router.prompt_errors import PromptError
from router.talks import Talks
from router.template import ChatTemplate
from router.tokenizer_files import TokenizerConfig
from tests.router.golden import MODELS, body_of, golden, golden_files, golden_prompter

NOW = datetime(2026, 3, 1, 12, 30)  # noqa: DTZ001 - templates print wall clocks
TOKENS: Final = {"bos_token": "<s>", "eos_token": "</s>"}

TURN: Final = "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}"

RESUMABLE: Final = {
    "place and first": "{% for message in messages %}<|im_start|>{{ loop.index0 % 3 }}{{ loop.index % 2 }}"
    "{% if loop.first %}!{% endif %}{{ message.content }}{% endfor %}",
    "last": "{% for message in messages %}<|im_start|>{{ message.content }}{% if loop.last %}.{% endif %}{% endfor %}",
    "neighbours": "{% for message in messages %}<|im_start|>"
    "{% if not loop.first and messages[loop.index0 - 1].role == message.role %}+{% endif %}{{ message.content }}"
    "{% if not loop.last and messages[loop.index0 + 1].role == message.role %}-{% endif %}{% endfor %}",
    "two ahead": "{% for message in messages %}<|im_start|>{{ message.content }}"
    "{% if messages[loop.index0 + 2] is defined %}{{ messages[loop.index0 + 2].role }}{% endif %}{% endfor %}",
    "first message": "{% for message in messages %}<|im_start|>{{ messages[0].content }}{{ message.content }}{% endfor %}",
    "all systems first": "{% set ns = namespace(system='') %}{% for message in messages %}"
    "{% if message.role == 'system' %}{% set ns.system = ns.system + message.content %}{% endif %}{% endfor %}"
    "<|im_start|>{{ ns.system }}{% for message in messages %}{% if message.role != 'system' %}" + TURN + "{% endif %}"
    "{% endfor %}",
    "last question": "{% set ns = namespace(last=0) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for message in messages %}<|im_start|>"
    "{% if ns.last <= loop.index0 %}{{ message.reasoning_content }}{% endif %}{{ message.content }}{% endfor %}",
    "system in the last question": "{% set ns = namespace(last=0) %}{% for message in messages %}"
    "{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}<|im_start|>{% if loop.index0 == ns.last %}{{ messages[0].content }}{% endif %}"
    "{{ message.content }}{% endfor %}",
    "a count of questions": "{% set ns = namespace(n=0, tool='') %}{% for message in messages %}<|im_start|>"
    "{% if message.role == 'user' %}{% set ns.n = ns.n + 1 %}{% set ns.tool = message.content %}{% endif %}"
    "{{ ns.tool }}{% if ns.n % 2 == 1 %}odd{% endif %}{{ message.content }}{% endfor %}{{ ns.tool }}",
    "alternating": "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0].content %}"
    "{% else %}{% set rest = messages %}{% endif %}{% for message in rest %}<|im_start|>"
    "{% if loop.first and system is defined %}{{ system }}{% endif %}{{ message.content }}"
    "{% if tools is defined and tools %}{{ tools | tojson }}{% endif %}{% endfor %}",
    "system cut off": "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}{{ system }}{% for message in messages %}"
    "<|im_start|>{{ message.content }}{{ messages[0].role }}{% if not loop.last %}{{ messages[loop.index0 + 1].role }}"
    "{% endif %}{% if not loop.first %}{{ messages[loop.index0 - 1].content }}{% endif %}{% endfor %}",
    "system cut off, by another name": "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% else %}"
    "{% set rest = messages %}{% endif %}{% for message in rest %}<|im_start|>{{ message.content }}"
    "{% if not loop.last %}{{ messages[loop.index0 + 1].content }}{% endif %}{% endfor %}",
    "variables": "{% if mood is defined %}{% set tone = mood %}{% else %}{% set tone = 'none' %}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ tone }}{% if shout %}!{% endif %}{{ message.content }}{% endfor %}",
    "a macro": "{% macro said(message, end='.') %}{{ message.content }}{{ end }}{{ bos_token }}{% endmacro %}"
    "{% for message in messages %}<|im_start|>{{ said(message) }}{% endfor %}",
    "leaves out": "{% for message in messages %}{% if message.role == 'system' %}{% continue %}{% endif %}"
    "<|im_start|>{{ message.content }}{% endfor %}{{ messages[-1].content }}{% if messages | length > 3 %}x{% endif %}",
    "no cut": "{% for message in messages %}{{ message.role + ': ' + message.content }}\n{% endfor %}",
}
NOT_RESUMABLE: Final = {
    "length": "{% for message in messages %}<|im_start|>{% if messages | length > 3 %}x{% endif %}{{ message.content }}"
    "{% endfor %}",
    "loop length": "{% for message in messages %}<|im_start|>{% if loop.length > 3 %}x{% endif %}{{ message.content }}"
    "{% endfor %}",
    "to the end": "{% for message in messages %}<|im_start|>{% if loop.revindex < 3 %}x{% endif %}{{ message.content }}"
    "{% endfor %}",
    "last message": "{% for message in messages %}<|im_start|>{{ messages[-1].content }}{{ message.content }}{% endfor %}",
    "one before, unguarded": "{% for message in messages %}<|im_start|>{{ messages[loop.index0 - 1].content }}"
    "{{ message.content }}{% endfor %}",
    "all of them": "{% for message in messages %}<|im_start|>{% for other in messages %}{{ other.role }}{% endfor %}"
    "{% endfor %}",
    "stops": "{% for message in messages %}{% if message.role == 'tool' %}{% break %}{% endif %}<|im_start|>"
    "{{ message.content }}{% endfor %}",
    "backwards": "{% for message in messages[::-1] %}<|im_start|>{{ message.content }}{% endfor %}",
    "by another name": "{% set all = messages %}{% for message in messages %}<|im_start|>{{ all[-1].content }}{% endfor %}",
    "in a macro": "{% macro last() %}{{ messages[-1].content }}{% endmacro %}{% for message in messages %}<|im_start|>"
    "{{ last() }}{% endfor %}",
    "what a macro sees": "{% set ns = namespace(last='') %}{% for message in messages %}"
    "{% set ns.last = message.content %}{% endfor %}{% macro last() %}{{ ns.last }}{% endmacro %}"
    "{% for message in messages %}<|im_start|>{{ last() }}{% endfor %}",
    "the date": "{% for message in messages %}<|im_start|>{{ strftime_now('%S') }}{{ message.content }}{% endfor %}",
    "inside of another": "{% if tools %}{{ 1 }}{% else %}{% for message in messages %}<|im_start|>"
    "{{ message.content }}{% endfor %}{% endif %}",
    "a list of messages": "{% set rest = messages[1:] %}{% for message in messages %}<|im_start|>"
    "{% if rest %}x{% endif %}{{ message.content }}{% endfor %}",
    "other messages": "{% set messages = messages + messages %}{% for message in messages %}<|im_start|>{{ message.content }}"
    "{% endfor %}",
    "cut in a loop": "{% for other in messages %}{% set messages = messages[1:] %}{% endfor %}{% for message in messages %}"
    "<|im_start|>{{ message.content }}{% endfor %}",
    "chosen ones": "{% for message in messages if message.role == 'user' %}<|im_start|>{{ message.content }}{% endfor %}",
}
UNLIKE: Final = {
    "a method of what is noted": "{% set ns = namespace(last='') %}{% for message in messages %}"
    "{% set ns.last = message.content %}{% endfor %}{% for message in messages %}<|im_start|>"
    "{% if ns.last.startswith('a') %}x{% endif %}{{ message.content }}{% endfor %}",
    "a value from the end": "{% set last = messages[-1].content %}{% for message in messages %}<|im_start|>"
    "{{ last }}{{ message.content }}{% endfor %}",
    "a name of the client's": "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% endif %}"
    "{% for message in rest %}<|im_start|>{{ message.content }}{% endfor %}",
    "a name of its own": "{% for message in messages %}<|im_start|>{% if content is defined %}{{ content }}{% endif %}"
    "{% set content = message.content %}{{ content }}{% endfor %}",
}
"""Whose beginnings may change with what follows, as they find out when they are asked."""


@cache
def template(name: str) -> ChatTemplate:
    if name in MODELS:
        config = TokenizerConfig.parse(golden_files(name).config_json)
        return ChatTemplate(config.chat_templates, config.special_tokens)
    return ChatTemplate({"default": (RESUMABLE | NOT_RESUMABLE | UNLIKE)[name]}, TOKENS)


CUTS: Final = ("<|im_start|>", "<start_of_turn>", "<|start_header_id|>", "<｜User｜>", "<｜Assistant｜>")


def written(messages: object) -> bytes:
    return json.dumps(messages).encode()


def ids(text: str) -> bytes:
    """Of a tokenizer that knows characters only, and halves of them."""
    return text.encode(errors="surrogatepass")


class Asked:
    """Bodies one after the other, each compared with its rendering as a whole."""

    def __init__(self, template: ChatTemplate, max_bytes: int = 1 << 24) -> None:
        self._template = template
        self.talks = Talks(template, ids, CUTS, max_bytes)
        self.continued = 0

    def ask(self, body: Mapping[str, Any], encode: Callable[[Any], bytes] = written) -> None:
        body = json.loads(json.dumps(body))  # no object is one of an earlier request
        try:
            expected = self._whole(body)
        except PromptError:
            expected = None
        assert self._found(body, encode(body["messages"])) == expected

    def _whole(self, body: Mapping[str, Any]) -> bytes:
        chat = Chat.from_body(body).in_servers_form(join_parts=not self._template.reads_parts)
        return ids(self._template.render(chat, NOW))

    def _found(self, body: Mapping[str, Any], source: bytes) -> bytes | None:
        try:
            sighting = self.talks.sight(source)
            if (talk := sighting.known) is not None:
                assert source.startswith(talk.source)
                new = Chat.from_body({**body, "messages": body["messages"][len(talk.messages) :]})
                if (packed := self.talks.go_on(sighting, new, NOW)) is not None:
                    self.continued += 1
                    return packed
            packed = self.talks.begin(sighting, Chat.from_body(body), NOW)
            return self._whole(body) if packed is None else packed
        except PromptError:
            return None


LONG = "x" * 1100
TEXTS = st.text(st.sampled_from("ab \n<>/&é日think"), max_size=9) | st.sampled_from(
    [
        "<think>\nwhy\n</think>\n\nso",
        "<tool_response>a</tool_response>",
        "<|im_start|>",
        "\x1c",
        "\ufdd1",
        "\ufffd",
        "\ud800",
    ]
)
CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries(
                {
                    "name": TEXTS,
                    "arguments": TEXTS | st.dictionaries(TEXTS, st.integers(0, 3) | st.booleans(), max_size=2),
                }
            ),
        }
    ),
    max_size=2,
)
MESSAGES = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": TEXTS}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": TEXTS | st.none()},
        optional={"reasoning_content": TEXTS, "tool_calls": CALLS},
    ),
    st.fixed_dictionaries(
        {
            "role": st.just("user"),
            "content": st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}), max_size=2),
        }
    ),
)
TURNS = st.lists(MESSAGES, min_size=1, max_size=3)
TOOLS = st.none() | st.just([{"type": "function", "function": {"name": "f", "parameters": {}}}])
VARIABLES = st.dictionaries(
    st.sampled_from(["mood", "shout", "enable_thinking", "content", "bos_token", "tools_in_user_message"]),
    st.booleans() | st.integers(0, 1) | st.sampled_from(["", "1", "x"]),
    max_size=2,
) | st.fixed_dictionaries({"rest": st.lists(st.fixed_dictionaries({"content": TEXTS}), max_size=4)})


@st.composite
def alike(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Bodies of which each is the one before with something changed, mostly with something more."""
    first = draw(st.sampled_from(["user", "system"]))
    messages = [{"role": first, "content": LONG}, *draw(TURNS)]
    options: dict[str, Any] = {}
    bodies = []
    for _ in range(draw(st.integers(2, 7))):
        bodies.append({**options, "messages": list(messages)})
        match draw(
            st.sampled_from(
                ["more", "more", "more", "last", "edit", "drop", "system", "tools", "variables", "open", "again"]
            )
        ):
            case "more":
                messages += draw(TURNS)
            case "last":
                messages[-1] = draw(MESSAGES)
            case "edit":
                messages[draw(st.integers(0, len(messages) - 1))] = draw(MESSAGES)
            case "drop":
                del messages[draw(st.integers(1, len(messages))) :]
            case "system":
                messages[0] = {"role": first, "content": LONG + draw(TEXTS)}
            case "tools":
                options["tools"] = draw(TOOLS)
            case "variables":
                options["chat_template_kwargs"] = draw(VARIABLES)
            case "open":
                options["add_generation_prompt"] = draw(st.booleans())
                options["continue_final_message"] = not options["add_generation_prompt"] and draw(st.booleans())
    return bodies


@pytest.mark.parametrize("name", [*MODELS, *RESUMABLE, *NOT_RESUMABLE, *UNLIKE])
@settings(deadline=None, max_examples=25)
@given(bodies=alike())
def test_what_is_remembered_never_changes_a_prompt(name: str, bodies: list[dict[str, Any]]) -> None:
    asked = Asked(template(name))

    for body in bodies:
        asked.ask(body)


def talk(turns: int, **options: Any) -> dict[str, Any]:
    messages = [{"role": ("user", "assistant")[turn % 2], "content": f"{turn} {LONG}"} for turn in range(turns)]
    return {**options, "messages": messages}


@pytest.mark.parametrize("name", [*MODELS, *(name for name in RESUMABLE if name != "no cut")])
def test_a_talk_that_goes_on_is_continued_from_its_third_sighting(name: str) -> None:
    asked = Asked(template(name))

    for turns in range(3, 13, 2):
        asked.ask(talk(turns))

    assert asked.continued == 3


@pytest.mark.parametrize("name", [*NOT_RESUMABLE])
def test_a_loop_that_may_write_another_beginning_is_never_begun_in_its_middle(name: str) -> None:
    assert template(name).is_native
    assert not template(name).is_resumable


@pytest.mark.parametrize("name", [*UNLIKE])
def test_whether_a_beginning_stays_the_same_may_be_for_each_talk_to_say(name: str) -> None:
    assert template(name).is_resumable


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "deepseek_v3"])
def test_an_edit_in_the_middle_finds_nothing(name: str) -> None:
    asked = Asked(template(name))
    for turns in (5, 7, 9):
        asked.ask(talk(turns))
    edited = talk(11)
    edited["messages"][2]["content"] += "!"

    asked.ask(edited)

    assert asked.continued == 1


def test_reasoning_that_is_left_out_when_a_question_follows_is_rendered_again() -> None:
    asked = Asked(template("qwen3"))
    question = {"role": "user", "content": LONG}
    steps: list[dict[str, Any]] = []
    for number in range(6):
        called = {"function": {"name": "f", "arguments": {"n": number}}}
        steps += [
            {"role": "assistant", "content": "", "reasoning_content": f"think {number}", "tool_calls": [called]},
            {"role": "tool", "content": str(number)},
        ]
        asked.ask({"messages": [question, *steps]})
    assert asked.continued == 4

    asked.ask({"messages": [question, *steps, question]})  # now none of the reasoning is there

    assert asked.continued == 4


@pytest.mark.parametrize(
    "encode", [written, msgspec.json.encode, lambda messages: json.dumps(messages, indent=2).encode()]
)
def test_a_talk_is_known_however_its_json_is_laid_out(encode: Callable[[Any], bytes]) -> None:
    asked = Asked(template("qwen3"))

    for turns in (5, 7, 9):
        asked.ask(talk(turns), encode)

    assert asked.continued == 1


def test_a_talk_that_proves_other_than_its_proof_ends_all_trust() -> None:
    lies = False

    def encode(text: str) -> bytes:
        return ids(text) + (b"!" if lies and not text.startswith("<|im_start|>user\n0") else b"")

    talks = Talks(template("qwen3"), encode, CUTS, 1 << 24)
    for turns in (5, 7):
        talks.begin(talks.sight(written(talk(turns)["messages"])), Chat.from_body(talk(turns)), NOW)
    lies = True
    found = set()

    for _ in range(300):
        sighting = talks.sight(written(talk(9)["messages"]))
        if sighting.known is None:
            break
        new = Chat(talk(9)["messages"][len(sighting.known.messages) :])
        found.add(talks.go_on(sighting, new, NOW))

    assert not talks.trusted
    assert talks.counts.mistaken == 1
    assert len(found) == 2  # the wrong ids until then, and the right ones
    assert talks.sight(written(talk(9)["messages"])).known is None


def test_what_does_not_come_again_leaves_hashes_only() -> None:
    asked = Asked(template("qwen3"))

    asked.ask(talk(9))

    assert asked.talks.size_bytes == 0
    asked.ask(talk(9))
    assert asked.talks.size_bytes > 0


def test_threads_share_talks_without_wrong_ids() -> None:
    talks = Asked(template("qwen3"), 1 << 17)
    bodies = [talk(turns, tools=tools) for turns in range(3, 9) for tools in (None, [{"function": {"name": "f"}}])]

    def ask_all(seed: int) -> None:
        for _ in range(20):
            for number in range(len(bodies)):
                talks.ask(bodies[number * seed % len(bodies)])

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(ask_all, seed) for seed in (1, 5, 7, 11)]:
            done.result()


def test_memory_is_bounded() -> None:
    talks = Talks(template("qwen3"), ids, CUTS, 1 << 20)

    for number in range(200):
        messages = [{"role": "user", "content": f"{number} {LONG}" * 3} for _ in range(5)]
        for _ in range(2):
            talks.begin(talks.sight(written(messages)), Chat(messages), NOW)

    assert 0 < talks.size_bytes <= 1 << 20
    assert talks.sight(written(messages)).known is not None


def test_a_talk_too_large_for_any_request_is_told_by_its_parts() -> None:
    asked = Asked(template("smollm2"))
    parts = [{"type": "text", "text": "x"}] * 500
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": LONG}, *({"role": "user", "content": parts} for _ in range(3))]
    }
    for _ in range(2):
        asked.ask(body)
        body["messages"].append({"role": "user", "content": "x"})
    sighting = asked.talks.sight(written(body["messages"]))
    assert sighting.known is not None

    assert asked.talks.go_on(sighting, Chat([{"role": "user", "content": parts}] * 3), NOW) is None


@pytest.mark.parametrize("model", MODELS[:2])
def test_ids_of_recorded_chats_are_the_same_wherever_they_are_cut(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.known_talks._MIN_BYTES", 1)
    monkeypatch.setattr("router.known_talks._PLACES", [1])
    recorded = golden_prompter(model, native=True)
    continued = 0
    for case in golden(model)["cases"]:
        body = body_of(case)
        prompter = Prompter("", recorded._template, recorded._tokenizer)
        messages = body["messages"]
        try:
            expected = prompter.pack_chat(body, NOW)
        except PromptError:
            continue
        for length in (*range(2, len(messages) + 1), len(messages)):
            begun = {**body, "messages": [*messages[: length - 1], {"role": "user", "content": "?"}]}
            for known in (begun, begun, body):
                source = written(known["messages"])
                sighting = prompter.sight_talk(source)
                packed = None
                if sighting.known is not None:
                    new = known["messages"][len(sighting.known.messages) :]
                    packed = prompter.continue_talk(sighting, {**known, "messages": new}, NOW)
                    continued += packed is not None
                if packed is None:
                    try:
                        packed = prompter.begin_talk(sighting, known, NOW)
                    except PromptError:
                        continue
                assert known is begun or packed == expected
    assert continued > 20
