import msgspec
import pytest

from gateway.model_cards import ModelCards, parse_models

LISTED = (
    b'{"object":"list","data":[{"id":"base","object":"model","root":"org/base","parent":null,"max_model_len":8192},'
    b'{"id":"lora","object":"model","root":"/adapters/x","parent":"base","max_model_len":4096},{"id":"bare"}]}'
)


def test_a_pool_shows_what_holds_for_all_its_replicas() -> None:
    cards = ModelCards()
    cards.learn("r1", "base", parse_models(LISTED))
    cards.learn("r2", "base", parse_models(LISTED.replace(b"8192", b"2048")))

    assert cards.longest("base") == 8192
    assert cards.entry("base", 7.9) == {
        "id": "base",
        "object": "model",
        "created": 7,
        "owned_by": "warmpath",
        "root": "org/base",
        "parent": None,
        "max_model_len": 2048,
    }


def test_an_adapter_names_its_base() -> None:
    cards = ModelCards()
    cards.learn("r", "lora", parse_models(LISTED))

    entry = cards.entry("lora", 0)

    assert (entry["root"], entry["parent"], entry["max_model_len"]) == ("/adapters/x", "base", 4096)


@pytest.mark.parametrize("name", ["x" * 513, "m\n# HELP x", "m\x1b[31m", "m\x00"])
def test_a_name_that_cannot_be_one_is_no_answer(name: str) -> None:
    answer = msgspec.json.encode({"data": [{"id": name}]})

    with pytest.raises(msgspec.ValidationError):
        parse_models(answer)


def test_what_was_not_told_is_null() -> None:
    cards = ModelCards()
    cards.learn("bare", "bare", parse_models(LISTED))
    cards.learn("other", "not-listed", parse_models(LISTED))
    cards.learn("gone", "base", parse_models(LISTED))
    cards.forget("gone")

    assert [cards.max_model_len(model) for model in ("bare", "not-listed", "base")] == [None] * 3
    assert cards.entry("bare", 0)["root"] == "bare"
