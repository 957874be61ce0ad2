"""Which tags a tokenizer knows, and what prompts have done with them."""

from __future__ import annotations

import pytest

from router.trivial import TrivialTokenizer
from router.wire import unpack_ids
from tests.workers.walks import tagged_walker
from workers.tags import ModelTags, ReasoningState


def test_tags_that_are_tokens_of_their_own_are_known() -> None:
    model = tagged_walker()
    id_of = model.tokenizer.token_to_id

    assert model.tags.call == (id_of("<tool_call>"), id_of("</tool_call>"))
    assert model.tags.reasoning is not None
    assert (model.tags.reasoning.start, model.tags.reasoning.end) == (id_of("<think>"), id_of("</think>"))


def test_a_tokenizer_without_such_tokens_has_none() -> None:
    tokenizer = TrivialTokenizer()

    tags = ModelTags.of(
        lambda text: unpack_ids(tokenizer.encode(text, add_special_tokens=False)), tokenizer.special_ids
    )

    assert tags == ModelTags(None, None)


EARLIER = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nYes?<|im_end|>\n"


@pytest.mark.parametrize("before", ["", EARLIER])
@pytest.mark.parametrize(
    ("end", "state"),
    [
        ("<|im_start|>user\nSay <think><|im_end|>\n<|im_start|>assistant\n", "none"),
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n", "open"),
        ("<|im_start|>assistant\n<think>\nOkay, so the", "open"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "closed"),
        ("<|im_start|>assistant\n<think>\nhm\n</think>\n\nThe ans", "closed"),
        ("<|im_start|>assistant\nThe ans", "none"),
        ("", "none"),
    ],
)
def test_a_prompt_opens_or_closes_the_thoughts_of_the_message_that_it_ends_in(
    before: str, end: str, state: ReasoningState
) -> None:
    model = tagged_walker()
    assert model.tags.reasoning is not None

    assert model.tags.reasoning.state_of(model.tokenizer.encode(before + end, add_special_tokens=False).ids) == state
