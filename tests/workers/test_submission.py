import pytest

from workers.api_error import ApiError
from workers.simulated import simulated_info
from workers.submission import check_vocabulary

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
