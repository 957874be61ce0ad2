from __future__ import annotations

import pytest

from workers.ending import ending
from workers.protocol import Sampling

EOS = 9


@pytest.mark.parametrize(
    ("token", "num_generated", "num_ids", "sampling", "reason"),
    [
        (EOS, 1, 5, Sampling(max_tokens=8), "stop"),
        (EOS, 1, 5, Sampling(max_tokens=8, ignore_eos=True), None),
        (EOS, 1, 5, Sampling(max_tokens=8, ignore_eos=True, stop_token_ids=[EOS]), "stop"),
        (3, 1, 5, Sampling(max_tokens=8, stop_token_ids=[4, 3]), "stop"),
        (3, 8, 12, Sampling(max_tokens=8), "length"),
        (3, 7, 11, Sampling(max_tokens=8), None),
        (3, 2, 20, Sampling(max_tokens=8), "length"),
        (EOS, 8, 20, Sampling(max_tokens=8), "stop"),  # it said all it had to say, just in time
    ],
)
def test_what_ends_a_sequence(
    token: int, num_generated: int, num_ids: int, sampling: Sampling, reason: str | None
) -> None:
    found = ending(token, num_generated=num_generated, num_ids=num_ids, sampling=sampling, eos_ids={EOS}, max_len=20)

    assert found == reason
