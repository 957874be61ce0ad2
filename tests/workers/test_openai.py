import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.wire import encode_ids, pack_ids
from workers.api_error import ApiError
from workers.openai import parse_chat, parse_completion, sane_request_id
from workers.prompts import chat_fields, parse_tokenize

HELLO = [{"role": "user", "content": "hello"}]


def chat_body(**fields: Any) -> bytes:
    return json.dumps({"messages": HELLO, **fields}).encode()


def completion_body(**fields: Any) -> bytes:
    return json.dumps({"prompt": "hello", **fields}).encode()


def refusal(body: bytes, parse: Any = parse_chat) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(body)
    return caught.value


def test_absent_fields_take_openais_defaults() -> None:
    request = parse_chat(chat_body())

    assert (request.n, request.temperature, request.top_p, request.top_k) == (1, 1.0, 1.0, 0)
    assert request.max_tokens is None
    assert request.seed is None
    assert request.stop == ()
    assert not request.stream
    assert request.field is None


def test_null_means_absent_for_every_optional_field() -> None:
    names = [
        *("n", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream", "stream_options", "logprobs"),
        *("tools", "tool_choice", "response_format", "logit_bias", "cache_salt", "chat_template", "warmpath", "model"),
    ]

    assert parse_chat(chat_body(**dict.fromkeys(names))) == parse_chat(chat_body(**dict.fromkeys(names)))
    assert parse_chat(chat_body(**dict.fromkeys(names))).n == 1


def test_values_arrive_as_given() -> None:
    request = parse_completion(
        completion_body(
            n=2,
            max_tokens=7,
            temperature=0,
            top_p=0.5,
            top_k=40,
            seed=3,
            stop="END",
            stream=True,
            stream_options={"include_usage": True},
            ignore_eos=True,
            stop_token_ids=[1, 2],
        )
    )

    assert (request.n, request.max_tokens, request.temperature, request.top_p) == (2, 7, 0.0, 0.5)
    assert (request.top_k, request.seed, request.stop) == (40, 3, ("END",))
    assert request.stream
    assert request.include_usage
    assert request.ignore_eos
    assert request.stop_token_ids == (1, 2)


def test_max_completion_tokens_wins_over_the_old_name() -> None:
    assert parse_chat(chat_body(max_tokens=5, max_completion_tokens=9)).max_tokens == 9


def test_top_k_of_minus_one_is_off() -> None:
    assert parse_chat(chat_body(top_k=-1)).top_k == 0


def test_a_temperature_next_to_nothing_is_greedy() -> None:
    assert parse_chat(chat_body(temperature=1e-310)).temperature == 0.0


@pytest.mark.parametrize("field", ["n", "max_tokens", "top_k", "seed"])
def test_a_number_of_ten_thousand_digits_is_refused(field: str) -> None:
    assert refusal(b'{"messages":[],"%b":%b}' % (field.encode(), b"9" * 10_000)).status == 400


def test_a_negative_seed_is_one_of_the_64_bit_seeds() -> None:
    assert parse_chat(chat_body(seed=-1)).seed == (1 << 64) - 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", True),
        ("n", 0),
        ("n", 9),
        ("n", 10**9),
        ("n", 1.0),
        ("n", "1"),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", True),
        ("max_tokens", 1.0),
        ("max_completion_tokens", "7"),
        ("temperature", -1),
        ("temperature", 2.1),
        ("temperature", 1e308),
        ("temperature", True),
        ("temperature", "0.5"),
        ("top_p", 0),
        ("top_p", 2),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", 2**70),
        ("max_tokens", 2**70),
        ("seed", 2**70),
        ("seed", -(2**63) - 1),
        ("seed", 1.5),
        ("seed", True),
        ("stop", ""),
        ("stop", [""]),
        ("stop", ["a"] * 5),
        ("stop", "x" * 257),
        ("stop", 3),
        ("stop", ["a", 3]),
        ("min_tokens", -1),
        ("min_tokens", 1.0),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 2.1),
        ("repetition_penalty", True),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", False),
        ("presence_penalty", 2.1),
        ("presence_penalty", "1"),
        ("logit_bias", {"5": 100.1}),
        ("logit_bias", {"5": True}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1.0": 1}),
        ("logit_bias", {"4294967296": 1}),
        ("logit_bias", [1]),
        ("logit_bias", {str(id_): 1 for id_ in range(1025)}),
        ("logprobs", 1),
        ("logprobs", "true"),
        ("top_logprobs", 5),
        ("top_logprobs", 21),
        ("top_logprobs", True),
        ("include_stop_str_in_output", "yes"),
        ("skip_special_tokens", 0),
        ("return_token_ids", 1),
        ("include_reasoning", "no"),
        ("parallel_tool_calls", 0),
        ("continue_final_message", 1),
        ("response_format", "json"),
        ("structured_outputs", []),
        ("tools", []),
        ("tools", "f"),
        ("tools", [{"type": "function", "function": {"name": "a b"}}]),
        ("tools", [{"type": "browser", "function": {"name": "f"}}]),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": []}}]),
        ("tool_choice", "auto"),
        ("tool_choice", "required"),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stream", "yes"),
        ("stream", 1),
        ("ignore_eos", 1),
        ("stream_options", {"include_usage": True}),
        ("model", 3),
    ],
)
def test_a_value_of_wrong_type_or_range_is_refused_by_name(field: str, value: Any) -> None:
    error = refusal(chat_body(**{field: value}))

    assert error.status == 400
    assert error.param is not None
    assert error.param.partition("[")[0] == field


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
@pytest.mark.parametrize("field", [b"temperature", b"top_p", b"seed"])
def test_what_is_no_json_number_is_refused(field: bytes, number: bytes) -> None:
    assert refusal(b'{"messages":[],"%b":%b}' % (field, number)).status == 400


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b'{"messages":[]} trailing',
        b"\xef\xbb\xbf{}",
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        '{"messages":[]}'.encode("utf-16"),
        b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"n":' + b"9" * 100_000 + b"}",
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    assert refusal(body).status == 400


@pytest.mark.parametrize(
    "name", ["chat_template", "cache_salt", "prompt_embeds", "kv_transfer_params", "truncate_prompt_tokens"]
)
def test_fields_that_reach_into_the_replica_are_unknown(name: str) -> None:
    error = refusal(chat_body(**{name: "x"}))

    assert (error.status, error.code, error.param) == (400, "unknown_parameter", name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 2),
        ("use_beam_search", True),
        ("length_penalty", 0.5),
        ("bad_words", ["x"]),
        ("allowed_token_ids", [1]),
        ("guided_json", {}),
        ("guided_regex", "a"),
        ("prompt_logprobs", 1),
        ("prompt_logprobs", 0),
        ("return_tokens_as_token_ids", True),
        ("spaces_between_special_tokens", False),
        ("thinking_token_budget", 5),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("audio", {"voice": "x"}),
        ("echo", True),
        ("add_special_tokens", True),
    ],
)
def test_a_field_that_would_change_the_answer_in_a_way_we_cannot_is_refused(name: str, value: Any) -> None:
    error = refusal(chat_body(**{name: value}))

    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", name)


@pytest.mark.parametrize(("name", "value"), [("suffix", "x"), ("best_of", 3), ("prompt_logprobs", 1)])
def test_the_same_holds_for_completions(name: str, value: Any) -> None:
    error = refusal(completion_body(**{name: value}), parse_completion)

    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", name)


def test_values_that_ask_for_nothing_pass() -> None:
    parse_chat(
        chat_body(
            logprobs=False,
            top_logprobs=0,
            presence_penalty=0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            logit_bias={},
            min_p=0.0,
            response_format={"type": "text"},
            tool_choice="none",
            skip_special_tokens=True,
            bad_words=[],
            echo=False,
        )
    )
    parse_completion(completion_body(echo=False, suffix=None, best_of=1, logprobs=None))


def test_sampling_fields_arrive_as_given() -> None:
    request = parse_chat(
        chat_body(
            min_p=0.1,
            min_tokens=3,
            repetition_penalty=1.1,
            frequency_penalty=-2,
            presence_penalty=2,
            logit_bias={"5": -100, "6": 1.5},
        )
    )

    assert (request.min_p, request.min_tokens, request.repetition_penalty) == (0.1, 3, 1.1)
    assert (request.frequency_penalty, request.presence_penalty) == (-2.0, 2.0)
    assert request.logit_bias == {5: -100.0, 6: 1.5}


def test_a_chat_asks_for_logprobs_with_a_bool_and_a_number() -> None:
    assert parse_chat(chat_body()).logprobs is None
    assert parse_chat(chat_body(logprobs=True)).logprobs == 0
    assert parse_chat(chat_body(logprobs=True, top_logprobs=20)).logprobs == 20


@pytest.mark.parametrize("value", [True, False, "5", [5], 5.0, -1, 21])
def test_a_completion_asks_for_logprobs_with_a_number_and_nothing_else(value: Any) -> None:
    assert refusal(completion_body(logprobs=value), parse_completion).param == "logprobs"
    assert parse_completion(completion_body(logprobs=5)).logprobs == 5


def test_no_answer_at_all_is_for_those_who_only_want_an_echo() -> None:
    assert refusal(completion_body(max_tokens=0), parse_completion).param == "max_tokens"
    assert parse_completion(completion_body(max_tokens=0, echo=True)).only_echoes
    assert not parse_completion(completion_body(max_tokens=0, echo=True, logprobs=0)).only_echoes


def test_a_message_is_continued_or_answered_but_not_both() -> None:
    both = chat_body(continue_final_message=True, add_generation_prompt=True)

    assert refusal(both).param == "continue_final_message"
    parse_chat(chat_body(continue_final_message=True))
    parse_chat(chat_body(continue_final_message=True, add_generation_prompt=False))


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}, "description": name}}
    for name in ("get_weather", "get_time")
]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ("auto", True, None)),
        ({"tool_choice": None}, ("auto", True, None)),
        ({"tool_choice": "none"}, ("none", True, None)),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ("required", False, None)),
        ({"tool_choice": {"type": "function", "function": {"name": "get_time"}}}, ("named", False, "get_time")),
    ],
)
def test_which_tools_may_or_must_be_called(fields: dict[str, Any], expected: Any) -> None:
    use = parse_chat(chat_body(tools=TOOLS, **fields)).tool_use

    assert use is not None
    assert (use.choice, use.parallel, use.name) == expected
    assert [tool.function.name for tool in use.tools] == ["get_weather", "get_time"]


@pytest.mark.parametrize(
    "choice",
    [
        "always",
        "",
        {"type": "function", "function": {"name": "nope"}},
        {"type": "function"},
        {"type": "allowed_tools"},
        3,
    ],
)
def test_a_tool_choice_that_names_nothing_is_refused(choice: Any) -> None:
    assert str(refusal(chat_body(tools=TOOLS, tool_choice=choice)).param).startswith("tool_choice")


def test_of_a_field_that_is_given_twice_the_last_one_counts() -> None:
    request = parse_chat(b'{"messages":[1],"n":2,"messages":[],"n":3,"seed":5,"seed":null}')

    assert (request.n, request.prompt, request.seed) == (3, b"[]", None)


RESUME = {"ids": "", "response_id": "chatcmpl-1", "created": 5}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True, "n": 2}, "warmpath.resume"),
        ({}, "warmpath.resume"),
        ({"stream": True, "warmpath": {"resume": {**RESUME, "response_id": "a b"}}}, "warmpath.resume.response_id"),
        ({"stream": True, "warmpath": {"resume": {**RESUME, "created": -1}}}, "warmpath.resume.created"),
        ({"stream": True, "warmpath": {"resume": {**RESUME, "ids": 3}}}, "warmpath.resume.ids"),
        ({"stream": True, "warmpath": {"resume": {}}}, "warmpath.resume.ids"),
    ],
)
def test_only_a_stream_of_one_choice_is_resumed(fields: dict[str, Any], param: str) -> None:
    assert refusal(chat_body(**{"warmpath": {"resume": RESUME}, **fields})).param == param
    assert parse_chat(chat_body(stream=True, warmpath={"resume": RESUME})).resume is not None


def test_fields_unknown_to_us_pass() -> None:
    parse_chat(chat_body(user="u", metadata={"a": 1}, store=True, service_tier="auto", brand_new={"deep": [1]}))


def test_a_missing_prompt_is_named() -> None:
    assert refusal(b"{}").param == "messages"
    assert refusal(b'{"prompt":null}', parse_completion).param == "prompt"


def test_with_the_ids_at_hand_the_prompt_is_not_looked_at() -> None:
    field = {"prompt_ids": encode_ids(pack_ids([1, 2, 3])), "seed": 5, "salt": "s", "request_id": "r-1"}

    request = parse_chat(json.dumps({"messages": "anything", "warmpath": field}).encode())

    assert request.field is not None
    assert request.seed == 5


@pytest.mark.parametrize(
    "field",
    [
        "x",
        {"request_id": "bad id"},
        {"request_id": "x" * 129},
        {"salt": "x" * 257},
        {"priority": 1 << 40},
        {"patience": -0.1},
        {"patience": 101},
        {"seed": 1 << 64},
    ],
)
def test_a_malformed_field_of_the_gateway_is_refused(field: Any) -> None:
    assert refusal(chat_body(warmpath=field)).status == 400


@pytest.mark.parametrize(
    ("text", "sane"), [("req-1_A", True), ("", False), ("a b", False), ("a\n", False), ("x" * 129, False)]
)
def test_request_ids_from_outside_are_plain(text: str, sane: bool) -> None:
    assert sane_request_id(text) == sane


scalars = st.sampled_from([None, True, False, 0, 1, -1, 1.5, 1e308, 2**70, "", "x", "é" * 300])
json_values = scalars | st.lists(scalars, max_size=3) | st.dictionaries(st.sampled_from(["a", "type"]), scalars)


@given(
    fields=st.dictionaries(
        st.sampled_from(
            [
                *("n", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream", "stream_options"),
                *("logit_bias", "min_p", "min_tokens", "top_logprobs", "echo", "structured_outputs"),
                *("logprobs", "response_format", "tools", "tool_choice", "warmpath", "messages", "prompt", "model"),
            ]
        ),
        json_values,
        max_size=4,
    )
)
def test_any_json_object_gives_a_request_or_a_400(fields: dict[str, Any]) -> None:
    body = json.dumps({"messages": HELLO, "prompt": "x", **fields}).encode()

    statuses = {_status(parse, body) for parse in (parse_chat, parse_completion, chat_fields, parse_tokenize)}

    assert statuses <= {200, 400}


def _status(parse: Callable[[bytes], object], body: bytes) -> int:
    try:
        parse(body)
    except ApiError as error:
        return error.status
    return 200
