"""The tables of `warmpath explain` and `warmpath decisions`; the commands run whole in `tests/system/test_up.py`."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from gateway.commands.explain import decisions_table, explanation_table
from gateway.planes.explainer import endpoint_of


def candidate(replica: str, cost_s: float, **changes: Any) -> dict[str, Any]:
    made = {
        "replica": replica,
        "eligible": True,
        "why_not": "",
        "matched_tokens": 32,
        "uncached_tokens": 68,
        "wait_s": 0.0,
        "own_s": cost_s,
        "cost_s": cost_s,
        "trust": "exact",
        "inflight": 0,
    }
    return made | changes


def shown(table: Table) -> list[str]:
    text = io.StringIO()
    Console(file=text, width=240).print(table)
    return [line for line in text.getvalue().splitlines() if line.strip()]


def test_the_cheapest_replica_comes_first_and_those_that_cannot_be_chosen_last() -> None:
    busy = candidate("w0", 0.0, eligible=False, why_not="busy")
    found = {"chosen": "w2", "candidates": [busy, candidate("w1", 0.9), candidate("w2", 0.5)]}

    lines = shown(explanation_table(found))[2:]

    assert [line.split()[0] for line in lines] == ["→", "w1", "w0"]
    assert "w2" in lines[0]
    assert "busy" in lines[2]


def test_a_decision_shows_what_was_predicted_and_what_came() -> None:
    decision = {
        "time": 0.0,
        "request_id": "[red]mine[/x]",
        "model": "m",
        "chosen": "w1",
        "reason": "longest_prefix",
        "tries": 1,
        "status": 200,
        "prompt_tokens": 100,
        "matched_tokens": 32,
        "cached_tokens": None,
        "first_byte_s": 0.25,
        "duration_s": 1.5,
    }

    line = shown(decisions_table([decision]))[2]

    assert "[red]mine[/x]" in line
    assert line.split()[-5:] == ["100", "32", "–", "0.250", "1.500"]


@pytest.mark.parametrize(
    ("body", "endpoint"),
    [
        (b'{"model": "m", "messages": []}', "/v1/chat/completions"),
        (b'{"model": "m", "messages": null}', "/v1/chat/completions"),
        (b'{"model": "m", "prompt": "messages"}', "/v1/completions"),
        (b'{"model": "m", "prompt": "{\\"messages\\": []}"}', "/v1/completions"),
        (b"nonsense", "/v1/completions"),
    ],
)
def test_only_a_field_named_messages_makes_a_chat(body: bytes, endpoint: str) -> None:
    assert endpoint_of(body) == endpoint
