import itertools
import json
from typing import Any

import pytest

from workers.api_error import ApiError
from workers.openai import parse_chat
from workers.protocol import Submit
from workers.simulated import simulated_info
from workers.submission import check_vocabulary, submissions

INFO = simulated_info()


def test_ids_of_the_vocabulary_pass() -> None:
    check_vocabulary([], INFO, "tokens")
    check_vocabulary([0, INFO.vocab_size - 1], INFO, "tokens")


def test_an_id_outside_the_vocabulary_is_named() -> None:
    with pytest.raises(ApiError) as caught:
        check_vocabulary([1, INFO.vocab_size, 2], INFO, "tokens")

    assert caught.value.status == 400
    assert caught.value.param == "tokens"
    assert str(INFO.vocab_size) in caught.value.message


def submitted(fields: dict[str, Any], **info: Any) -> Submit:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    request = parse_chat(json.dumps(body).encode())
    (found,) = submissions(
        request, [b"\0\0\0\0"], simulated_info(**info), request_id="r", seed=1, rids=itertools.count()
    )
    return found


def test_a_gateway_says_in_which_order_to_compute_and_its_clients_do_not() -> None:
    found = submitted({"priority": -9, "warmpath": {"priority": 2, "patience": 0.5}}, takes_priority=True, patience=3.0)

    assert (found.priority, found.patience, found.interrupts) == (2, 0.5, True)


@pytest.mark.parametrize(("takes_priority", "priority"), [(True, -9), (False, 0)])
def test_without_a_gateway_the_field_priority_counts_where_it_is_to(takes_priority: bool, priority: int) -> None:
    found = submitted({"priority": -9}, takes_priority=takes_priority, patience=3.0)

    assert (found.priority, found.patience, found.interrupts) == (priority, 3.0, not takes_priority)


@pytest.mark.parametrize("priority", ["high", 1.5, True, 1 << 60])
def test_a_priority_that_is_none_is_refused_where_it_counts(priority: object) -> None:
    with pytest.raises(ApiError) as caught:
        submitted({"priority": priority})

    assert caught.value.param == "priority"
    assert submitted({"priority": priority, "warmpath": {}}).priority == 0
