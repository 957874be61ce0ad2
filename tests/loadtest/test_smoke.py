"""What `warmpath smoke` holds against a system, from the rows of its table alone."""

from __future__ import annotations

from loadtest.smoke import Answer, Row, faults

LONG, SHORT = 640, 240
"""Prompt tokens of a first turn: more and less than what is worth keeping a talk where it is."""


def talk(first: Answer, second: Answer, *, uncached_s: float = 0.2) -> list[Row]:
    """Two turns, the second one also timed without its past."""
    cold = Answer(uncached_s, second.prompt_tokens, 0, "a")
    return [Row("talk", 1, warm=[first]), Row("talk", 2, warm=[second], cold=[cold])]


def answer(replica: str = "a", *, prompt_tokens: int = LONG, cached_tokens: int = 0, ttft_s: float = 0.1) -> Answer:
    return Answer(ttft_s, prompt_tokens, cached_tokens, replica)


def test_a_talk_that_stays_and_finds_its_past_is_right() -> None:
    rows = talk(answer(), answer(prompt_tokens=700, cached_tokens=LONG))

    assert faults(rows) == []


def test_a_talk_with_a_short_past_may_move() -> None:
    rows = talk(answer(prompt_tokens=SHORT), answer("b", prompt_tokens=300))

    assert faults(rows) == []


def test_a_talk_with_a_long_past_may_not_move() -> None:
    rows = talk(answer(), answer("b", prompt_tokens=700, cached_tokens=LONG))

    assert faults(rows) == ["talk, turn 2: went from a to b"]


def test_a_past_becomes_long_at_256_cacheable_tokens() -> None:
    """Whole blocks count: of 271 tokens 256 are cacheable, of 255 only 240."""
    moved = {
        tokens: faults(talk(answer(prompt_tokens=tokens), answer("b", prompt_tokens=300))) for tokens in (255, 271)
    }

    assert not moved[255]
    assert moved[271] == ["talk, turn 2: went from a to b", "talk, turn 2: 0 tokens cached of 256"]


def test_a_talk_that_stays_and_lost_its_past_is_wrong_however_short_that_was() -> None:
    for tokens in (SHORT, LONG):
        rows = talk(answer(prompt_tokens=tokens), answer(prompt_tokens=700, cached_tokens=tokens // 2))

        assert faults(rows) == [f"talk, turn 2: {tokens // 2} tokens cached of {tokens}"]


def test_a_tenth_of_the_past_may_be_missing() -> None:
    rows = talk(answer(), answer(prompt_tokens=700, cached_tokens=LONG * 9 // 10))

    assert faults(rows) == []


def test_a_past_that_saves_no_time_is_wrong_where_it_is_long() -> None:
    slow = talk(answer(), answer(prompt_tokens=700, cached_tokens=LONG, ttft_s=0.3))
    too_short_to_tell = talk(
        answer(prompt_tokens=SHORT), answer(prompt_tokens=300, cached_tokens=SHORT, ttft_s=0.3), uncached_s=0.2
    )

    assert faults(slow) == ["talk, turn 2: first token after 0.300 s, uncached 0.200 s"]
    assert faults(too_short_to_tell) == []


def test_the_least_of_repeated_times_counts() -> None:
    rows = talk(answer(), answer(prompt_tokens=700, cached_tokens=LONG, ttft_s=0.3))
    for row in rows:
        row.warm.append(answer(prompt_tokens=row.warm[0].prompt_tokens, cached_tokens=row.warm[0].cached_tokens))

    assert faults(rows) == []


def test_every_time_that_a_turn_was_run_is_judged_and_talks_apart() -> None:
    stays = talk(answer("a"), answer("a", prompt_tokens=700, cached_tokens=LONG))
    for row, again in zip(stays, (answer("b"), answer("c", prompt_tokens=700, cached_tokens=LONG)), strict=True):
        row.warm.append(again)
    other = [Row("other", 1, warm=[answer("d")])]

    assert faults([stays[0], *other, stays[1]]) == ["talk, turn 2: went from b to c"]
