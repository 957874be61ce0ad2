"""Whatever a replica says, nothing raises and no estimate leaves what is possible; what is true is found in tests/fleet."""

from __future__ import annotations

import math
from statistics import median
from typing import cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router import Outcome, Query, Reservation, Router, RoutingSettings, chunk_names
from router.blocks import CHUNK_BYTES, CHUNK_ENDS
from router.learning import MAX_TOK_S, MIN_TOK_S, CacheSize, Density, Pace
from router.text_index import RUN_ENTRIES, TextHolding
from tests.router.fleets import ROOT, decide, foreign_fleet, view

counts = st.integers(-(2**63), 2**63) | st.integers(-2, 300_000)
seconds = st.floats(-10, 1e6) | st.sampled_from([0.0, -0.0, 1e-300, math.inf, -math.inf, math.nan])


# -- density


def test_fewer_than_half_of_the_answers_may_be_nonsense() -> None:
    density = Density(4.0)
    for number in range(31):
        density.learn(3000, 1000 if number % 2 == 0 else 100)

    assert density.bytes_per_token == 3.0


@pytest.mark.parametrize(
    ("num_bytes", "tokens"), [(255, 64), (1000, 0), (1000, -5), (1000, 10**12), (10**6, 85), (0, 0)]
)
def test_answers_that_tell_nothing_of_a_text_teach_nothing(num_bytes: int, tokens: int) -> None:
    density = Density(4.0)

    assert not density.learn(num_bytes, tokens)
    assert density.bytes_per_token == 4.0


@given(st.lists(st.integers(100, 900), min_size=1, max_size=100))
def test_density_is_the_median_of_the_last_answers(prompt_tokens: list[int]) -> None:
    density = Density(4.0)
    for tokens in prompt_tokens:
        assert density.learn(1000, tokens)

    assert density.bytes_per_token == median([1000 / tokens for tokens in prompt_tokens[-31:]])


@given(st.lists(st.tuples(counts, counts)))
def test_density_stays_within_what_text_can_be(answers: list[tuple[int, int]]) -> None:
    density = Density(4.0)
    for num_bytes, tokens in answers:
        density.learn(num_bytes, tokens)

    assert 0.5 <= density.bytes_per_token <= 64


# -- pace


@given(st.floats(0, 60), st.floats(1e-3, 1e9), st.lists(st.tuples(counts, seconds), max_size=60))
def test_a_pace_is_always_one_that_can_be_reckoned_with(
    fixed_s: float, tok_s: float, samples: list[tuple[int, float]]
) -> None:
    pace = Pace(fixed_s, tok_s)
    for tokens, taken_s in samples:
        pace.learn(tokens, taken_s)

    assert MIN_TOK_S * 0.999 <= pace.tok_s <= MAX_TOK_S * 1.001
    assert 0 <= pace.fixed_s < math.inf
    assert 0 < pace.seconds(1000) < math.inf


def test_prompts_of_one_length_leave_the_fixed_cost_at_its_prior() -> None:
    pace = Pace(0.02, 8000)
    for _ in range(50):
        pace.learn(1000, 0.02 + 1000 / 2000)

    assert pace.fixed_s == pytest.approx(0.02, rel=0.3)
    assert pace.tok_s == pytest.approx(2000, rel=0.05)


def test_ten_thousand_prompts_without_work_are_a_fixed_cost() -> None:
    pace = Pace(0.02, 8000)
    for _ in range(10_000):
        pace.learn(0, 0.05)

    assert pace.fixed_s == pytest.approx(0.05, rel=0.1)


def test_a_pace_that_changes_is_followed() -> None:
    pace = Pace(0.02, 8000)
    for tok_s in (8000, 1500):
        for number in range(50):
            tokens = 500 + 371 * number % 5000
            pace.learn(tokens, 0.02 + tokens / tok_s)
        assert pace.tok_s == pytest.approx(tok_s, rel=0.15)


def test_a_whole_answer_that_came_sooner_than_its_prompt_should_shows_a_faster_replica() -> None:
    pace = Pace(0.02, 8000)
    for _ in range(20):
        pace.learn_bound(8000, 0.001)

    assert pace.seconds(8000) < 0.0015
    assert pace.samples == 0


def test_an_answer_that_took_long_says_nothing_of_the_prompt_in_it() -> None:
    pace = Pace(0.02, 8000)
    for taken_s in (1.1, 5.0, 60.0, 0.9 * pace.seconds(8000)):
        pace.learn_bound(8000, taken_s)

    assert (pace.fixed_s, pace.tok_s) == (0.02, 8000)


def test_one_odd_answer_hardly_moves_a_pace_that_was_measured() -> None:
    pace = Pace(0.02, 8000)
    for number in range(20):
        tokens = 500 + 371 * number % 5000
        pace.learn(tokens, 0.02 + tokens / 8000)

    pace.learn_bound(5000, 0.0)

    assert pace.tok_s < 1.3 * 8000


def test_prompts_that_were_cached_without_anybodys_knowing_do_not_outweigh_those_that_were_timed() -> None:
    pace = Pace(0.02, 8000)
    for _ in range(100):
        pace.learn(4000, 0.52)
        pace.learn_bound(4000, 0.05)

    assert pace.tok_s < 1.2 * 8000


@given(
    st.lists(st.tuples(st.integers(0, 100_000), st.floats(0, 60)), max_size=20),
    st.lists(st.tuples(counts, seconds), min_size=1, max_size=20),
    st.integers(0, 100_000),
)
def test_a_bound_never_makes_a_pace_slower(
    samples: list[tuple[int, float]], bounds: list[tuple[int, float]], asked: int
) -> None:
    pace = Pace(0.02, 8000)
    for tokens, taken_s in samples:
        pace.learn(tokens, taken_s)
    for tokens, taken_s in bounds:
        before = pace.seconds(asked)
        pace.learn_bound(tokens, taken_s)
        assert pace.seconds(asked) <= before
        assert pace.fixed_s >= 0
        assert MIN_TOK_S * 0.999 <= pace.tok_s <= MAX_TOK_S * 1.001


# -- cache size


def test_a_miss_lowers_the_bound_to_its_distance_but_at_most_by_half() -> None:
    size = CacheSize()
    size.missed(900, 1000)
    assert size.blocks == 900

    size.missed(10, 900)
    assert size.blocks == 450

    size.missed(5000, 450)
    assert size.blocks == 450


def test_what_outlived_the_bound_raises_it() -> None:
    size = CacheSize()
    size.outlived(100)

    assert size.blocks == 150


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1 << 40), st.integers(0, 1 << 40))))
def test_a_cache_size_is_never_nothing_and_never_boundless(events: list[tuple[bool, int, int]]) -> None:
    size = CacheSize()
    for missed, distance, bound in events:
        if missed:
            size.missed(distance, bound)
        else:
            size.outlived(bound)

    assert size.blocks is None or 16 <= size.blocks <= 1 << 24


# -- all of it in a router


def asked(number: int, num_bytes: int) -> Query:
    text = (b"%032d" % number) * (num_bytes // 32 + 1)
    return Query(
        model="m", names=chunk_names(text[:num_bytes], ROOT), num_tokens=num_bytes // 4 + 1, num_bytes=num_bytes
    )


def answered_whole(router: Router, number: int, taken_s: float, *, streamed: bool = False) -> None:
    what = msgspec.structs.replace(asked(number, 32_000), streamed=streamed)
    reservation = router.begin(decide(router, what, float(number)), what, "x", float(number))
    router.finish(reservation, number + taken_s, Outcome.OK, None)


def test_a_fleet_whose_pace_was_mistaken_is_trusted_again_after_whole_answers() -> None:
    router = foreign_fleet(1)
    answered_whole(router, 0, 4.0, streamed=True)
    assert router.prefill_tok_s("m") < 4000

    for number in range(1, 17):
        answered_whole(router, number, 0.02)

    assert router.prefill_tok_s("m") > 100_000


def test_whole_answers_alone_are_no_measurement() -> None:
    router = foreign_fleet(1)
    for number in range(10):
        answered_whole(router, number, 0.02)

    assert view(router).prefill_tok_s is None


def test_an_answer_without_work_says_nothing_of_what_prompts_cost() -> None:
    router = foreign_fleet(1)
    answered_whole(router, 0, 1.02, streamed=True)
    nothing = Query(model="m", names=[], num_tokens=0, streamed=False)
    fixed_s = view(router).fixed_s

    for number in range(1, 10):
        reservation = router.begin(decide(router, nothing, float(number)), nothing, "x", float(number))
        router.finish(reservation, number + 0.001, Outcome.OK, None)

    assert view(router).fixed_s == fixed_s


stories = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.integers(0, 20_000),
        st.none() | counts,
        st.none() | counts,
        st.sampled_from([Outcome.OK, Outcome.OK, Outcome.CANCELLED, Outcome.CLIENT_ERROR]),
        st.floats(-5, 5),
        st.booleans(),
    ),
    max_size=40,
)


@given(stories, st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_answers_absurd_missing_and_out_of_order_break_nothing(story, order) -> None:  # type: ignore[no-untyped-def]
    router = foreign_fleet(2, RoutingSettings(learned_tokens=20_000, index_bytes=220 * 200))
    open_: list[tuple[Reservation, tuple[int | None, int | None, Outcome]]] = []
    now = 1000.0
    for number, num_bytes, cached, prompt, outcome, step_s, answers in story:
        now += step_s
        decision = decide(router, asked(number, num_bytes), now, order.random())
        open_.append((router.begin(decision, asked(number, num_bytes), "x", now), (cached, prompt, outcome)))
        order.shuffle(open_)
        if answers:
            reservation, (cached, prompt, outcome) = open_.pop()
            router.answered(reservation, now - step_s)
            router.finish(reservation, now, outcome, cached, prompt)
        for candidate in decision.candidates:
            assert 0 <= candidate.matched_tokens <= decision.prompt_tokens
            assert 0 < candidate.cost_s < math.inf
        holdings = [cast(TextHolding, replica.holding) for replica in router._replicas.values()]
        held = [name for holding in holdings for name in holding.names()]
        assert router._room.used == len(held) + RUN_ENTRIES * sum(len(list(each.runs())) for each in holdings) <= 200
        ends = [0, *CHUNK_ENDS]
        held_bytes = sum(ends[run.place + len(run.names)] - ends[run.place] for each in holdings for run in each.runs())
        assert sum(each.expected_blocks for each in router.replicas()) * CHUNK_BYTES == held_bytes
    for reservation, (cached, prompt, outcome) in open_:
        router.finish(reservation, now, outcome, cached, prompt)

    assert [(each.inflight, each.promised_tokens) for each in router.replicas()] == [(0, 0), (0, 0)]
    assert view(router).accuracy.agreed <= view(router).accuracy.reported
