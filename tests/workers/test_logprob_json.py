from router.trivial import TrivialTokenizer
from router.wire import unpack_ids
from workers.logprob_json import chat_logprobs, completion_logprobs
from workers.protocol import TokenLogprob

TOKEN_BYTES = TrivialTokenizer().token_bytes


def ids_of(text: str) -> list[int]:
    return unpack_ids(TrivialTokenizer().encode(text, add_special_tokens=False)).tolist()


NEVER = float("-inf")
THE, FIRST_HALF, SECOND_HALF, OTHER_HALF = [*ids_of("The "), *ids_of("abc世d"), ids_of("abc丗")[0]]
"""The last three are parts of characters, two of them with one and the same text."""


def test_a_token_of_a_chat_is_decoded_text_with_its_true_bytes() -> None:
    """vllm#19177: chat logprobs gave byte-level vocabulary strings."""
    told = chat_logprobs(
        [THE, FIRST_HALF], [TokenLogprob(-0.5, []), TokenLogprob(-1.5, [(THE, -0.1), (7, NEVER)])], TOKEN_BYTES
    )

    first, second = told["content"]
    assert first == {"token": "The ", "logprob": -0.5, "bytes": list(b"The "), "top_logprobs": []}
    assert (second["token"], second["bytes"]) == ("abc\ufffd", list("abc世".encode()[:4]))
    assert [(each["token"], each["logprob"]) for each in second["top_logprobs"]] == [("The ", -0.1), ("\x07", -9999.0)]


def test_a_completions_logprobs_stand_in_columns() -> None:
    told = completion_logprobs([THE, THE], [None, TokenLogprob(-2.0, [(FIRST_HALF, -0.1)])], [0, 4], TOKEN_BYTES)

    assert told == {
        "tokens": ["The ", "The "],
        "token_logprobs": [None, -2.0],
        "top_logprobs": [None, {"abc\ufffd": -0.1, "The ": -2.0}],
        "text_offset": [0, 4],
    }


def test_of_tokens_with_one_text_the_likeliest_is_told() -> None:
    logprob = TokenLogprob(-3.0, [(FIRST_HALF, -0.1), (OTHER_HALF, -0.2)])

    (top,) = completion_logprobs([OTHER_HALF], [logprob], [0], TOKEN_BYTES)["top_logprobs"]

    assert top == {"abc\ufffd": -0.1}


def test_what_cannot_be_is_as_unlikely_as_json_can_say() -> None:
    told = completion_logprobs([THE], [TokenLogprob(NEVER, [])], [0], TOKEN_BYTES)

    assert told["token_logprobs"] == [-9999.0]
    assert told["top_logprobs"] == [{"The ": -9999.0}]
