"""Chat templates: texts that transformers rendered, and transformers itself as an oracle where it is quick to ask."""

from __future__ import annotations

import copy
import json
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from router.chat import Chat
from router.prompt_errors import PromptError, TokenizerError
from router.template import ChatTemplate

NOW = datetime(2026, 3, 1, 12, 30)  # noqa: DTZ001 - templates print wall clocks
GOLDEN = Path(__file__).parents[1] / "data" / "chat_golden"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


def golden(model: str) -> Any:
    return json.loads((GOLDEN / f"{model}.json").read_text())


def golden_cases() -> list[Any]:
    conversations = json.loads((GOLDEN / "conversations.json").read_text())
    return [
        pytest.param(model, conversations[case["conversation"]], case, id=f"{model}-{number}-{case['conversation']}")
        for model in ("smollm2", "qwen3")
        for number, case in enumerate(golden(model)["cases"])
    ]


TEMPLATES = {
    model: ChatTemplate({"default": golden(model)["chat_template"]}, golden(model)["special_tokens"])
    for model in ("smollm2", "qwen3")
}


def by_transformers(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    rendered: Any = render_jinja_template([messages], chat_template=source, **options)
    return str(rendered[0][0])


@cache
def template_of(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, {"bos_token": "<s>"})


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return template_of(source).render(Chat(messages or HELLO, **options), NOW)


@pytest.mark.parametrize(("model", "conversation", "case"), golden_cases())
def test_texts_equal_those_of_transformers(model: str, conversation: dict[str, Any], case: dict[str, Any]) -> None:
    untouched = copy.deepcopy(conversation)
    body = conversation | {name: case[name] for name in ("add_generation_prompt", "continue_final_message")}
    body["chat_template_kwargs"] = case.get("template_kwargs")

    if case.get("error") == "render":
        with pytest.raises(PromptError):
            TEMPLATES[model].render(Chat.from_body(body), NOW)
    else:
        assert TEMPLATES[model].render(Chat.from_body(body), NOW) == case["text"]
    assert conversation == untouched


FEATURES = """\
{{ bos_token }}{{ unk_token }}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- if documents %}{{ documents | tojson }}{% endif %}
{%- set ns = namespace(turns=0, roles=dict(user='U')) %}
{% for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- if message.role == 'stop' %}{% break %}{% endif %}
    {%- set ns.turns = ns.turns + 1 %}
{{ ns.roles.get(message.role, message.role) }}: {{ message | tojson(sort_keys=True) }}
    {% if message.role == 'assistant' %}
        {% generation %}
{%- set inner = 'said' %}{{ inner }} {{ message.content | trim }}
        {% endgeneration %}
    {% else %}
{{ message.content if message.content is string else '' }}
    {% endif %}
{{ inner }}
{% endfor %}
{{ ns.turns }} {{ effort | default('none') }}
{% if add_generation_prompt %}>>{% endif %}"""

CONTENTS = st.text(st.sampled_from("ab \n<>&\"'é日{}%"), max_size=12)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "skip", "stop"]), "content": st.none() | CONTENTS},
        optional={
            "thinking": CONTENTS,
            "reasoning": CONTENTS,
            "tool_calls": st.lists(st.fixed_dictionaries({"id": CONTENTS}), max_size=2),
        },
    ),
    min_size=1,
    max_size=5,
)
OBJECTS = st.none() | st.lists(st.dictionaries(CONTENTS, CONTENTS | st.integers() | st.none(), max_size=2), max_size=2)


@settings(deadline=None)
@given(messages=MESSAGES, tools=OBJECTS, documents=OBJECTS, add_generation_prompt=st.booleans())
def test_what_templates_can_use_works_as_in_transformers(
    messages: list[dict[str, Any]], tools: Any, documents: Any, add_generation_prompt: bool
) -> None:
    options = {"tools": tools, "documents": documents, "add_generation_prompt": add_generation_prompt}
    without_nulls = [{name: value for name, value in message.items() if value is not None} for message in messages]
    expected = by_transformers(FEATURES, without_nulls, bos_token="<s>", effort=3, **options)

    assert render(FEATURES, messages, variables={"effort": 3}, **options) == expected


CONTINUING = [
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}[end]{% endfor %}",
    "{% for message in messages %}[{{ message.role }}] {{ message.content | trim }}[end]{% endfor %}",
    "{% for message in messages %}[{{ message.role }}] {{ message.content | trim }} [end]{% endfor %}",
    "{% for message in messages %}{% for part in message.content %}{{ part.text }}{% endfor %}[end]{% endfor %}",
    "{% for message in messages %}[{{ message.role }}]{{ message.content | tojson }}[end]{% endfor %}",
    "{{ messages[0].content }}",
]


@pytest.mark.parametrize("source", CONTINUING)
@settings(deadline=None)
@given(first=CONTENTS, final=CONTENTS, as_parts=st.booleans())
def test_final_messages_are_continued_as_in_transformers(source: str, first: str, final: str, as_parts: bool) -> None:
    content = [{"type": "text", "text": "before"}, {"type": "text", "text": final}, {"type": "image"}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": first},
        {"role": "assistant", "content": content if as_parts else final},
    ]
    try:
        expected = by_transformers(source, messages, continue_final_message=True)
    except Exception:  # whatever transformers refuses
        with pytest.raises(PromptError):
            render(source, messages, add_generation_prompt=False, continue_final_message=True)
    else:
        assert render(source, messages, add_generation_prompt=False, continue_final_message=True) == expected


@pytest.mark.parametrize("final", [{"role": "assistant"}, {"role": "assistant", "content": [{"type": "image"}]}])
def test_a_final_message_without_text_cannot_be_continued(final: dict[str, Any]) -> None:
    with pytest.raises(PromptError, match="final message"):
        render(CONTINUING[0], [*HELLO, final], add_generation_prompt=False, continue_final_message=True)


def test_the_date_is_the_one_passed_in() -> None:
    assert render("{{ strftime_now('%d %b %Y') }}", variables={"strftime_now": "no"}) == "01 Mar 2026"


def test_a_clients_variables_win_over_the_models_tokens() -> None:
    assert render("{{ bos_token }}{{ thinking }}", variables={"bos_token": "", "thinking": False}) == "False"


def test_a_models_tool_template_is_used_when_there_are_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "with tools"}, {})

    assert template.render(Chat(HELLO), NOW) == "plain"
    assert template.render(Chat(HELLO, tools=[]), NOW) == "with tools"
    assert ChatTemplate({"default": "plain"}, {}).render(Chat(HELLO, tools=[]), NOW) == "plain"


@pytest.mark.parametrize("sources", [{}, {"rag": "{{ documents }}"}, {"tool_use": "with tools"}])
def test_a_model_without_a_fitting_template_cannot_chat(sources: dict[str, str]) -> None:
    with pytest.raises(PromptError, match="no chat template"):
        ChatTemplate(sources, {}).render(Chat(HELLO), NOW)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].missing.deeper }}",
        "{{ 'text' + 1 }}",
        "{{ messages | tojson | fromjson }}",
        "{{ undefined_value | tojson }}",
        "{% for i in range(10000000000) %}{% endfor %}",
        "{{ 1 // 0 }}",
    ],
)
def test_whatever_goes_wrong_in_a_template_is_a_prompt_error(source: str) -> None:
    with pytest.raises((PromptError, TokenizerError)):
        render(source)


def test_the_templates_own_words_reach_the_client_but_not_all_of_a_long_message() -> None:
    with pytest.raises(PromptError, match="Bad: aaa") as caught:
        render("{{ raise_exception('Bad: ' + messages[0].content) }}", [{"role": "user", "content": "a" * 100_000}])

    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{", "{% generation %}", "{% for a in b %}" * 300 + "{% endfor %}" * 300]
)
def test_a_template_that_does_not_compile_is_a_bad_file(source: str) -> None:
    with pytest.raises(TokenizerError, match="'default' does not compile"):
        ChatTemplate({"default": source}, {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update(content='changed') }}",
        "{{ dict.update(messages[0], content='changed') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ strftime_now.__self__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% set ns = namespace() %}{% set ns.__call__ = 1 %}",
        "{{ namespace(__html__=1) }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
    ],
)
def test_a_template_cannot_reach_out_or_change_the_request(source: str) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]

    try:
        reached = render(source, messages)
    except PromptError:
        reached = ""

    assert reached == ""
    assert messages == HELLO
