import random
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from router import (
    BlockName,
    BreakerState,
    Outcome,
    PoolMismatch,
    Query,
    Reservation,
    ReservationError,
    Router,
    RoutingSettings,
    Trust,
    UnknownReplica,
    Unroutable,
    chunk_names,
)
from router.wire import ReplicaSpec
from tests.router.fleets import (
    MODEL,
    RATE,
    ROOT,
    batch,
    decide,
    draws,
    foreign_fleet,
    hello,
    load,
    own_fleet,
    query,
    send,
    serve,
    spec,
    tokens,
    view,
    why_not,
)

# -- the decision


def test_second_turn_goes_back_to_the_replica_of_the_first() -> None:
    router = own_fleet(4)
    talks = [serve(router, query(tokens(talk, 400)), draw=draw) for talk, draw in enumerate(draws(40))]

    for (talk, first), draw in zip(enumerate(talks), draws(40), strict=True):
        decision = decide(router, query(tokens(talk, 400) + tokens(99, 50)), draw=draw)
        assert decision.replica_id == first
        assert decision.matched_tokens == 400
        assert decision.reason == "longest_prefix"
    assert len(set(talks)) == 4


def test_the_last_prompt_token_is_never_counted_as_matched() -> None:
    router = own_fleet(1)
    asked = query(tokens(1, 64))
    serve(router, asked)

    assert decide(router, asked).matched_tokens == 48
    assert decide(router, query(tokens(1, 65))).matched_tokens == 64


def test_ties_are_broken_by_the_draw() -> None:
    router = own_fleet(4)
    asked = query(tokens(1, 100))

    chosen = [decide(router, asked, draw=draw / 8).replica_id for draw in range(8)]

    assert Counter(chosen) == {"r0": 2, "r1": 2, "r2": 2, "r3": 2}


def test_gateways_that_hear_nothing_of_each_other_begin_with_different_replicas() -> None:
    firsts = []
    for gateway in (1, 2):
        router = own_fleet(4)
        router.configure(RoutingSettings(gateways=2, gateway=gateway))
        firsts.append({decide(router, query(tokens(1, 800)), draw=draw / 8).replica_id for draw in range(8)})

    assert firsts == [{"r0", "r2"}, {"r1", "r3"}]


def test_a_gateway_takes_what_another_one_chooses_first_where_that_is_sooner_by_enough() -> None:
    router = own_fleet(2)
    router.configure(RoutingSettings(gateways=2, gateway=1, away_s=0.3))
    asked = query(tokens(1, 1600))  # 0.2 s of computing

    for waiting_s, chosen in ((0.29, "r0"), (0.31, "r1")):
        router.apply("r0", load(tokens=int(waiting_s * RATE)), 0.0)
        assert decide(router, asked).replica_id == chosen


def test_what_gateways_choose_first_follows_who_comes_and_goes() -> None:
    router = own_fleet(3)
    router.configure(RoutingSettings(gateways=2, gateway=2, away_s=0.01))
    router.remove("r0")

    away_s = {each.replica: each.away_s for each in decide(router, query(tokens(1, 100))).candidates}

    assert away_s == {"r1": 0.01, "r2": 0.0}


@pytest.mark.parametrize(("gateway", "gateways"), [(2, 1), (0, 2)])
def test_a_gateway_is_one_of_those_that_there_are(gateway: int, gateways: int) -> None:
    with pytest.raises(ValueError, match="gateway is"):
        RoutingSettings(gateway=gateway, gateways=gateways)


def test_cost_is_wait_plus_w_times_own_work() -> None:
    router = own_fleet(2)
    for number, waiting in enumerate((8000, 16000)):
        router.apply(f"r{number}", load(tokens=waiting), 0.0)

    decision = decide(router, query(tokens(1, 800)))

    near, far = decision.candidates
    assert (near.wait_s, far.wait_s) == (1.0, 2.0)
    assert near.own_s == pytest.approx(800 / RATE + 0.02)
    assert decision.w == 9.0
    assert near.cost_s == pytest.approx(1.0 + 9.0 * near.own_s)
    assert decision.replica_id == "r0"


def test_a_short_prompt_does_not_wait_for_a_long_one_but_what_it_delays_counts() -> None:
    router = own_fleet(2)
    for number, asked in enumerate((query(tokens(1, 16_000)), query(tokens(2, 16_000)))):
        send(router, asked, request_id=f"long{number}")
    send(router, query(tokens(3, 8_000)), 0.5, request_id="middle")
    lighter, heavier = sorted(("r0", "r1"), key=lambda each: view(router, each).promised_tokens)

    found = {each.replica: each for each in decide(router, query(tokens(4, 800)), 1.0).candidates}

    assert (found[lighter].wait_s, found[heavier].wait_s) == (0.0, 0.0)
    assert (found[lighter].delayed, found[heavier].delayed) == (1, 2)
    assert found[heavier].cost_s == pytest.approx(3 * found[heavier].own_s)


def test_a_long_prompt_waits_for_those_that_came_before_it() -> None:
    router = own_fleet(1)
    send(router, query(tokens(1, 4_000)), request_id="first")

    (found,) = decide(router, query(tokens(2, 4_000)), 0.1).candidates

    assert found.wait_s == pytest.approx(0.4)
    assert found.delayed == 0


def own_fleet_in_order_of_arrival(count: int) -> Router:
    return own_fleet(count, RoutingSettings(patience=0.0))


@pytest.mark.parametrize("fleet", [own_fleet_in_order_of_arrival, foreign_fleet])
def test_a_replica_that_computes_in_order_of_arrival_is_waited_for(fleet: Callable[[int], Router]) -> None:
    router = fleet(1)
    send(router, query(tokens(1, 16_000)), request_id="long")

    (found,) = decide(router, query(tokens(2, 800)), 1.0).candidates

    assert found.wait_s == pytest.approx(1.0)
    assert found.delayed == 0


def test_a_prompt_waits_for_what_others_compute_that_it_shall_find_cached_and_not_for_the_rest() -> None:
    router = own_fleet(1)
    system = tokens(1, 8_000)
    send(router, query([*system, *tokens(2, 56_000)]), request_id="first")

    (soon,) = decide(router, query([*system, 1]), 0.25).candidates
    (later,) = decide(router, query([*system, 1]), 2.0).candidates
    (beside,) = decide(router, query(tokens(4, 10)), 0.25).candidates

    assert (soon.matched_tokens, later.matched_tokens, beside.matched_tokens) == (8_000, 8_000, 0)
    assert soon.wait_s == pytest.approx(0.75)
    assert (later.wait_s, beside.wait_s) == (0.0, 0.0)


def priority_fleet() -> Router:
    """A foreign replica that computes in the order it is told, and finishes what it has begun."""
    router = Router()
    router.add("r0", msgspec.structs.replace(spec("openai"), priority=True), 0.0)
    router.set_health("r0", True, 0.0)
    return router


def test_at_a_foreign_replica_short_prompts_pass_long_ones_that_have_not_begun() -> None:
    router = priority_fleet()
    send(router, query(tokens(1, 16_000)), request_id="begun")
    send(router, query(tokens(2, 16_000)), request_id="long")

    (found,) = decide(router, query(tokens(3, 800)), 1.0).candidates

    assert found.wait_s == pytest.approx(1.0)
    assert found.delayed == 1


def test_texts_under_way_count_for_what_they_share() -> None:
    router = priority_fleet()
    for number, text in enumerate((b"a" * 64_000, b"s" * 32_000 + b"b" * 96_000)):
        names = chunk_names(text, ROOT)
        asked = Query(model=MODEL, names=names, num_tokens=len(text) // 4, num_bytes=len(text))
        send(router, asked, request_id=str(number))
    text = b"s" * 32_000 + b"c" * 400
    asked = Query(model=MODEL, names=chunk_names(text, ROOT), num_tokens=len(text) // 4, num_bytes=len(text))

    (found,) = decide(router, asked, 1.0).candidates

    assert found.matched_tokens == pytest.approx(8_000, rel=0.1)
    assert found.wait_s == pytest.approx(1.0 + found.matched_tokens / RATE, rel=0.05)


def test_w_looks_only_at_replicas_that_may_be_used() -> None:
    router = own_fleet(2)
    router.apply("r0", load(tokens=8000), 0.0)
    router.patch("r1", cordoned=True)

    assert decide(router, query(tokens(1, 100))).w == 9.0


def test_w_is_bounded() -> None:
    router = own_fleet(1)
    router.apply("r0", load(tokens=10**9), 0.0)

    assert decide(router, query(tokens(1, 100))).w == 11.0


@pytest.mark.parametrize(("least_wait", "taken"), [(0, "r1"), (4000, "r0")])
def test_the_cache_is_worth_a_longer_wait_when_all_are_busy(least_wait: int, taken: str) -> None:
    router = own_fleet(2)
    asked = query([*tokens(1, 4800), 7])
    serve(router, asked)
    router.apply("r0", load(1, tokens=0), 0.0)
    router.apply("r0", batch(1, asked.names), 0.0)
    router.apply("r0", load(1, tokens=least_wait + 16000), 0.0)
    router.apply("r1", load(tokens=least_wait), 0.0)

    decision = decide(router, asked)

    waits = [candidate.wait_s for candidate in decision.candidates]
    assert waits[0] - waits[1] == 2.0, "more than the 0.6 s that the cache saves"
    assert decision.replica_id == taken


def test_a_replica_of_twice_the_weight_is_taken_until_it_costs_twice_as_much() -> None:
    router = own_fleet(2)
    router.patch("r1", weight=2.0)
    asked = query(tokens(1, 8000))
    assert decide(router, asked).replica_id == "r1"

    router.apply("r1", load(tokens=12000), 0.0)

    assert decide(router, asked).replica_id == "r0"


def test_route_changes_nothing() -> None:
    router = own_fleet(3)
    asked = query(tokens(1, 500))
    before = router.replicas()

    decisions = [decide(router, asked, now=now, draw=0.3) for now in (0.0, 0.0, 0.0)]

    assert decisions[0] == decisions[1] == decisions[2]
    assert router.replicas() == before


def test_a_rate_that_is_not_known_yet_is_taken_from_the_peers() -> None:
    router = own_fleet(2)
    asked = query(tokens(1, 600))
    router.begin(decide(router, asked, draw=0.0), asked, "x", 0.0)
    router.apply("r0", load(rate=100.0, admitted=["x"]), 0.0)

    turn = decide(router, query(tokens(1, 600) + tokens(2, 100)))

    assert turn.replica_id == "r0"
    assert turn.candidates[1].own_s == pytest.approx(700 / 100 + 0.02)


def test_a_talk_stays_although_its_replica_measured_a_little_slower() -> None:
    router = own_fleet(2)
    ids = tokens(1, 208)
    router.apply("r0", batch(1, query(ids).names), 0.0)
    router.apply("r0", load(1, rate=800), 0.0)
    router.apply("r1", load(0, rate=1200), 0.0)

    assert decide(router, query(ids + tokens(2, 600))).replica_id == "r0"


def test_a_replica_of_another_kind_of_machine_is_judged_by_its_own_rate() -> None:
    router = own_fleet(2)
    router.apply("r0", load(0, rate=1000), 0.0)
    router.apply("r1", load(0, rate=4000), 0.0)

    candidates = decide(router, query(tokens(1, 4000))).candidates

    assert [round(candidate.own_s, 2) for candidate in candidates] == [4.02, 1.02]


@pytest.mark.parametrize("policy", ["round_robin", "random", "least_load", "power_of_two"])
def test_the_baselines_can_be_chosen(policy: str) -> None:
    router = own_fleet(2, RoutingSettings(policy=policy))  # type: ignore[arg-type]
    asked = query(tokens(1, 400))

    chosen = Counter(serve(router, asked, draw=draw) for draw in draws(40))

    assert decide(router, asked).policy == policy
    assert min(chosen.values()) >= 12


def test_a_growing_conversation_has_one_place_by_consistent_hash() -> None:
    router = own_fleet(8, RoutingSettings(policy="consistent_hash"))

    for talk in range(20):
        beginning = tokens(talk, 1100)
        places = {decide(router, query(beginning + tokens(99, more))).replica_id for more in (0, 300, 900)}
        assert len(places) == 1


def test_least_load_counts_requests_from_their_begin_to_their_end() -> None:
    router = own_fleet(2, RoutingSettings(policy="least_load"))
    first = send(router, query(tokens(1, 400)))

    second = send(router, query(tokens(1, 400)))
    router.finish(first, 0.0, Outcome.OK, None)

    assert second.replica_id != first.replica_id
    assert decide(router, query(tokens(2, 400))).replica_id == first.replica_id


# -- bursts and hot prefixes


def test_a_burst_of_one_new_prompt_goes_to_one_replica_until_waiting_costs_more_than_prefilling_again() -> None:
    router = own_fleet(4)
    asked = query(tokens(1, 4000) + [7] * 10)
    for number in range(4):
        router.apply(f"r{number}", load(), 0.0)

    chosen = [send(router, asked, draw=draw).replica_id for draw in draws(60)]

    assert len(set(chosen[:8])) == 1
    assert len(set(chosen)) > 1


def test_long_prompts_with_short_answers_spread_by_their_tokens() -> None:
    """32k in, 1 out went to the first replica of all where requests were counted (sglang#27547, smg#1714)."""
    router = own_fleet(8)
    sent = Counter[str]()
    for number, draw in enumerate(draws(64)):
        short = number % 2
        reservation = send(router, query(tokens(number, 320 if short else 32_000)), 0.0, draw, request_id=str(number))
        if not short:
            sent[reservation.replica_id] += 1

    assert sorted(sent.values()) == [4] * 8


def test_a_nearly_idle_fleet_does_not_send_everybody_to_where_the_system_prompt_is() -> None:
    """Its few blocks save 10 ms; each answer that is being written there already counts for 2."""
    router = own_fleet(4)
    system, sent = tokens(0, 300), Counter[str]()
    for number, draw in enumerate(draws(40)):
        asked = query(system + tokens(1000 + number, 400))
        reservation = send(router, asked, float(number), draw, request_id=str(number))
        where = reservation.replica_id
        sent[where] += 1
        router.apply(where, batch(sent[where], asked.names), float(number))
        router.answered(reservation, number + 0.1)
        for replica in ("r0", "r1", "r2", "r3"):
            running = load(sent[replica], running=sent[replica], rate=28_000, admitted=[str(number)])
            router.apply(replica, running, number + 0.1)

    assert min(sent[f"r{number}"] for number in range(4)) >= 5


def test_a_shared_system_prompt_spreads_over_the_fleet() -> None:
    router = own_fleet(4)
    names = [f"r{number}" for number in range(4)]
    system = tokens(0, 300)
    sent, seq = Counter[str](), Counter[str]()
    free_at = dict.fromkeys(names, 0.0)
    for number, draw in enumerate(draws(200)):
        now = number * 0.015  # 400 new tokens in 15 ms are the work of 3.3 replicas
        asked = query(system + tokens(1000 + number, 400))
        reservation = send(router, asked, now, draw, request_id=str(number))
        where = reservation.replica_id
        sent[where] += 1
        seq[where] += 1
        free_at[where] = max(free_at[where], now) + reservation.uncached_tokens / RATE
        router.apply(where, batch(seq[where], asked.names), now)
        backlog = round((free_at[where] - now) * RATE)
        router.apply(where, load(seq[where], tokens=backlog, admitted=[str(number)]), now)
        router.finish(reservation, now, Outcome.OK, None)

    assert min(sent[name] for name in names) >= 30
    warm = {each.replica: each.matched_tokens for each in decide(router, query([*system, 1]), 9.0).candidates}
    assert warm == dict.fromkeys(names, 288)


def test_blocks_just_sent_count_until_their_expiry_and_longer_while_the_prompt_waits() -> None:
    router = own_fleet(1)
    asked, longer = query(tokens(1, 160)), query([*tokens(1, 160), 1])
    reservation = send(router, asked, 0.0)
    assert decide(router, longer, 0.0).matched_tokens == 160

    router.apply("r0", load(), 60.0)
    assert decide(router, longer, 60.0).matched_tokens == 160

    router.finish(reservation, 60.0, Outcome.OK, 0)
    router.apply("r0", load(), 60.1)
    assert decide(router, longer, 60.1).matched_tokens == 0


def test_an_event_confirms_blocks_just_sent() -> None:
    router = own_fleet(1)
    asked = query(tokens(1, 160))
    serve(router, asked, 0.0)
    router.apply("r0", batch(1, asked.names), 0.1)

    router.apply("r0", load(1), 100.0)

    assert decide(router, query([*tokens(1, 160), 1]), 100.0).matched_tokens == 160
    assert (view(router).confirmed_blocks, view(router).expected_blocks) == (10, 0)


def text_query(text: bytes) -> Query:
    return Query(MODEL, chunk_names(text, ROOT), num_tokens=len(text) // 4, num_bytes=len(text))


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.BUSY, Outcome.CLIENT_ERROR, Outcome.CANCELLED])
def test_a_prompt_that_was_not_computed_leaves_no_blocks_behind(outcome: Outcome) -> None:
    router = foreign_fleet(1)
    lost = send(router, text_query(b"a" * 2560), request_id="lost")
    kept = text_query(b"a" * 1280 + b"b" * 1280)
    send(router, kept, request_id="kept")

    router.finish(lost, 0.0, outcome, None)

    assert view(router).expected_blocks == len(kept.names)


@pytest.mark.parametrize("outcome", [Outcome.BUSY, Outcome.CLIENT_ERROR, Outcome.CANCELLED])
@pytest.mark.parametrize("others", [0, 1])
def test_a_prompt_that_was_not_computed_takes_nothing_with_it_that_was_there_before(
    outcome: Outcome, others: int
) -> None:
    """Else one client that leaves makes the talks of all forget where their common beginning is cached."""
    router = foreign_fleet(1)
    for number in range(1 + others):
        serve(router, text_query(b"a" * 2560 + b"%d" % number * 2560))
    before = text_query(b"a" * 2560 + b"0" * 2560)
    longer = text_query(b"a" * 2560 + b"0" * 5120)
    known = decide(router, longer, 9.0)

    lost = [send(router, asked, 9.0) for asked in (longer, text_query(b"a" * 2560 + b"other" * 512), before)]
    for reservation in lost:
        router.finish(reservation, 9.0, outcome, None)

    assert decide(router, longer, 99.0).matched_tokens == known.matched_tokens > 0
    assert view(router).expected_blocks == 20 + 10 * others


def test_a_replica_that_failed_may_have_lost_what_was_there_before() -> None:
    router = foreign_fleet(1)
    serve(router, text_query(b"a" * 2560))

    router.finish(send(router, text_query(b"a" * 5120), 9.0), 9.0, Outcome.FAILED, None)

    assert view(router).expected_blocks == 0


# -- replicas without events


def test_a_foreign_replica_is_learned_from_what_was_sent_there() -> None:
    router = foreign_fleet(3)
    pool = router.pool(MODEL)
    assert pool is not None
    assert (pool.key_space, pool.block_size) == ("text", 64)
    first = Query(MODEL, [BlockName(name) for name in range(10)], 650)

    where = serve(router, first, draw=0.5)
    decision = decide(router, Query(MODEL, [BlockName(name) for name in range(12)], 780), 500.0)

    assert decision.replica_id == where
    assert decision.matched_tokens == 640
    assert view(router, where).trust is Trust.LEARNING

    router.set_health(where, True, 600.1)
    assert view(router, where).expected_blocks == 0


def test_learned_blocks_are_capped_exactly_by_the_oldest_leaving() -> None:
    router = foreign_fleet(1, RoutingSettings(learned_tokens=64 * 100))
    for number in range(50):
        serve(router, Query(MODEL, [BlockName(number * 10 + name) for name in range(10)], 650), float(number))

    assert view(router).expected_blocks == 100
    assert decide(router, Query(MODEL, [BlockName(490 + name) for name in range(10)], 650)).matched_tokens == 640
    assert decide(router, Query(MODEL, [BlockName(390 + name) for name in range(10)], 650)).matched_tokens == 0


def test_nothing_is_learned_of_a_blind_replica() -> None:
    router = foreign_fleet(1, RoutingSettings(learned_tokens=0))
    serve(router, query(tokens(1, 640)))

    assert view(router).trust is Trust.BLIND
    assert view(router).expected_blocks == 0


# -- who may be chosen


def test_without_any_replica_no_model_is_unknown() -> None:
    """After a restart replicas take a moment to register, and clients take a 404 for their own mistake."""
    assert Router().route(query(tokens(1, 64)), 0.0, 0.0) == Unroutable("no_replica", 1.0)


def test_whether_all_prompts_are_texts_follows_the_pools() -> None:
    router = Router()
    seen = [router.all_text]
    for name, kind in (("a", "openai"), ("b", "warmpath"), ("c", "warmpath")):
        router.add(name, ReplicaSpec(url=f"http://{name}:1", model=f"model-{kind}", kind=kind), 0.0)
        seen.append(router.all_text)
    for name in ("b", "c"):
        router.remove(name)
        seen.append(router.all_text)

    assert seen == [True, True, False, False, False, True]


def test_an_unknown_model_is_told_apart_from_a_pool_without_replicas() -> None:
    router = own_fleet(1)
    assert router.route(query(tokens(1, 64), model="other"), 0.0, 0.0) == Unroutable("model_not_found")

    router.set_health("r0", False, 0.0)

    assert router.route(query(tokens(1, 64)), 0.0, 0.0) == Unroutable("no_replica", 1.0)


def test_a_replica_takes_nothing_before_it_was_seen_to_be_well() -> None:
    router = Router()
    router.add("r0", spec("openai"), 0.0)

    assert router.models() == [MODEL]
    assert router.route(query(tokens(1, 64)), 0.0, 0.0) == Unroutable("no_replica", 1.0)


def test_cordoned_draining_unhealthy_and_excluded_replicas_are_left_out() -> None:
    router = own_fleet(5)
    router.patch("r0", cordoned=True)
    router.patch("r1", draining=True)
    router.set_health("r2", False, 0.0)

    decision = decide(router, query(tokens(1, 64), exclude=["r3"]))

    reasons = {candidate.replica: candidate.why_not for candidate in decision.candidates}
    assert reasons == {"r0": "cordoned", "r1": "draining", "r2": "unhealthy", "r3": "excluded", "r4": ""}
    assert decision.replica_id == "r4"
    assert decision.reason == "only_replica"

    router.patch("r0", cordoned=False)
    assert why_not(router)["r0"] == ""


def test_a_busy_replica_is_left_alone_until_its_time() -> None:
    router = own_fleet(2)
    router.busy("r0", 5.0)
    assert why_not(router, 4.9) == {"r0": "busy", "r1": ""}

    router.busy("r1", 3.0)
    assert router.route(query(tokens(1, 64)), 2.0, 0.0) == Unroutable("capacity", 1.0)

    assert why_not(router, 5.0) == {"r0": "", "r1": ""}


def test_busy_answers_never_eject() -> None:
    router = own_fleet(1)
    for number in range(50):
        now = number * 10.0
        router.finish(send(router, query(tokens(1, 64)), now), now, Outcome.BUSY, None)

    assert view(router).breaker is BreakerState.CLOSED


def test_a_thousand_mistakes_of_clients_move_no_breaker() -> None:
    router = own_fleet(1)
    for _ in range(1000):
        router.finish(send(router, query(tokens(1, 64))), 0.0, Outcome.CLIENT_ERROR, None)

    assert view(router).breaker is BreakerState.CLOSED


def fail(router: Router, replica_id: str, times: int, now: float) -> None:
    others = [each.id for each in router.replicas() if each.id != replica_id]
    for _ in range(times):
        router.finish(send(router, query(tokens(1, 64), exclude=others), now), now, Outcome.FAILED, None)


def test_a_failing_replica_is_ejected_and_comes_back_by_one_request() -> None:
    router = own_fleet(2)
    fail(router, "r0", 5, 0.0)
    assert why_not(router, 29.0) == {"r0": "ejected", "r1": ""}

    trial = send(router, query(tokens(1, 64), exclude=["r1"]), 30.0)
    assert why_not(router, 30.0) == {"r0": "ejected", "r1": ""}

    router.answered(trial, 30.5)
    assert why_not(router, 30.5) == {"r0": "", "r1": ""}


def test_ejection_never_takes_down_a_pool() -> None:
    router = own_fleet(2)
    for name in ("r0", "r1"):
        fail(router, name, 5, 0.0)

    decision = decide(router, query(tokens(1, 64)), 1.0)
    assert decision.reason == "all_ejected"

    router.set_health("r0", False, 1.0)
    assert decide(router, query(tokens(1, 64)), 1.0).replica_id == "r1"
    assert router.route(query(tokens(1, 64), exclude=["r1"]), 1.0, 0.0) == Unroutable("no_replica", 1.0)


def test_an_operator_is_told_of_an_unknown_replica_and_of_a_senseless_weight() -> None:
    router = own_fleet(1)
    with pytest.raises(UnknownReplica):
        router.patch("nobody", cordoned=True)
    with pytest.raises(UnknownReplica):
        router.spec("nobody")
    for weight in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="weight"):
            router.patch("r0", weight=weight)

    assert view(router).weight == 1.0


# -- membership


def test_registering_again_changes_nothing_but_the_spec() -> None:
    router = own_fleet(1)
    router.apply("r0", batch(1, [1, 2]), 0.0)
    router.patch("r0", draining=True)

    router.add("r0", spec(), 9.0)

    assert view(router).confirmed_blocks == 2
    assert view(router).healthy
    assert view(router).draining
    assert router.spec("r0").credential == "secret"


def test_a_new_epoch_forgets_what_the_replica_held_but_not_what_operators_set() -> None:
    router = own_fleet(1)
    router.apply("r0", batch(1, [1, 2]), 0.0)
    router.patch("r0", weight=2.0, cordoned=True, draining=True)

    router.add("r0", spec(epoch="e2"), 1.0)

    again = view(router)
    assert (again.confirmed_blocks, again.healthy, again.draining) == (0, False, False)
    assert (again.weight, again.cordoned) == (2.0, True)
    assert router.resume_point("r0") is None


def test_a_restart_that_the_event_stream_told_first_is_not_forgotten_again() -> None:
    router = own_fleet(1)
    router.apply("r0", hello("e2"), 1.0)
    router.apply("r0", batch(1, [1, 2]), 1.0)

    router.add("r0", spec(epoch="e2"), 2.0)

    assert view(router).confirmed_blocks == 2
    assert view(router).trust is Trust.EXACT


def test_a_replica_that_leaves_takes_its_blocks_and_the_last_one_its_model() -> None:
    router = own_fleet(2)
    asked = query(tokens(1, 160))
    router.apply("r0", batch(1, asked.names), 0.0)

    router.remove("r0")
    router.remove("r0")

    assert [candidate.matched_tokens for candidate in decide(router, asked).candidates] == [0]
    router.remove("r1")
    assert router.models() == []
    assert router.pool(MODEL) is None


def test_a_replica_of_another_kind_or_revision_cannot_join_a_pool() -> None:
    router = own_fleet(1)
    for other in (spec("openai"), spec(revision="v2")):
        with pytest.raises(PoolMismatch):
            router.add("r1", other, 0.0)
    assert [each.id for each in router.replicas()] == ["r0"]

    router.add("r0", spec(revision="v2"), 1.0)

    pool = router.pool(MODEL)
    assert pool is not None
    assert (pool.revision, pool.created) == ("v2", 1.0)


def test_a_replica_whose_model_is_not_known_yet_serves_nothing() -> None:
    router = Router()
    router.add("r0", spec("openai", model=""), 0.0)
    router.add("r1", spec("warmpath", model=""), 0.0)
    router.set_health("r0", True, 0.0)
    assert router.models() == []
    assert router.pool("") is None
    assert router.route(query(tokens(1, 64), model=""), 0.0, 0.0) == Unroutable("no_replica", 1.0)

    router.add("r0", spec("openai"), 1.0)
    router.set_health("r0", True, 1.0)

    assert router.models() == [MODEL]
    assert decide(router, query(tokens(1, 64))).replica_id == "r0"


def test_what_comes_late_for_a_replica_that_left_is_ignored() -> None:
    router = own_fleet(1)
    asked = query(tokens(1, 64))
    decision = decide(router, asked)
    reservation = send(router, asked)
    router.remove("r0")

    router.set_health("r0", True, 0.0)
    router.busy("r0", 9.0)
    router.events_lost("r0", 0.0)
    router.apply("r0", load(), 0.0)
    router.apply_snapshot("r0", hello(), 0.0)
    router.end_snapshot("r0")
    router.answered(reservation, 0.0)
    router.finish(reservation, 0.0, Outcome.OK, 0)

    assert router.replicas() == []
    with pytest.raises(UnknownReplica):
        router.begin(decision, asked, "x", 0.0)


# -- promises


def test_predicted_and_reported_cached_tokens_are_compared() -> None:
    router = own_fleet(1)
    asked = query(tokens(1, 321))
    router.finish(send(router, asked), 0.0, Outcome.OK, 0)
    router.finish(send(router, asked), 0.0, Outcome.OK, 160)
    router.finish(send(router, asked), 0.0, Outcome.OK, None)

    accuracy = view(router).accuracy
    assert (accuracy.predicted, accuracy.reported, accuracy.precision, accuracy.recall) == (320, 160, 0.5, 1.0)


class Promises(RuleBasedStateMachine):
    """Whatever becomes of replicas and requests: when all requests have ended, nothing is promised."""

    requests = Bundle("requests")
    ids = st.sampled_from(["r0", "r1", "r2"])

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.now = 0.0
        self.held: list[Reservation] = []
        self.begun = 0

    @initialize()
    def start(self) -> None:
        self.join("r0", "warmpath")

    @rule(replica_id=ids, kind=st.sampled_from(["warmpath", "openai"]))
    def join(self, replica_id: str, kind: str) -> None:
        # A model of each kind, so that both are there at once.
        self.router.add(replica_id, spec(kind, model=kind), self.now)
        self.router.set_health(replica_id, True, self.now)

    @rule(replica_id=ids)
    def leave(self, replica_id: str) -> None:
        self.router.remove(replica_id)

    @rule(replica_id=ids, epoch=st.sampled_from(["e1", "e2"]), through_stream=st.booleans())
    def restart(self, replica_id: str, epoch: str, through_stream: bool) -> None:
        known = {each.id: each.spec for each in self.router.replicas()}
        if through_stream:
            self.router.apply(replica_id, hello(epoch, model="warmpath"), self.now)
        elif replica_id in known:
            self.router.add(
                replica_id, spec(known[replica_id].kind, model=known[replica_id].model, epoch=epoch), self.now
            )
            self.router.set_health(replica_id, True, self.now)

    @rule(replica_id=ids, admitted=st.lists(st.integers(0, 20), max_size=4))
    def report(self, replica_id: str, admitted: list[int]) -> None:
        self.router.apply(replica_id, load(admitted=[str(number) for number in admitted]), self.now)

    @rule(
        target=requests,
        model=st.sampled_from(["warmpath", "openai"]),
        prompt=st.integers(0, 4),
        length=st.integers(1, 200),
    )
    def begin(self, model: str, prompt: int, length: int) -> Reservation | None:
        asked = query(tokens(prompt, length), model=model)
        decision = self.router.route(asked, self.now, 0.5)
        if isinstance(decision, Unroutable):
            return None
        # Some ids are used twice, as clients do.
        reservation = self.router.begin(decision, asked, str(self.begun % 20), self.now)
        self.begun += 1
        self.held.append(reservation)
        return reservation

    @rule(reservation=requests)
    def answered(self, reservation: Reservation | None) -> None:
        if reservation in self.held:
            self.router.answered(reservation, self.now)

    @rule(reservation=consumes(requests), outcome=st.sampled_from(Outcome), cached=st.none() | st.integers(0, 300))
    def finish(self, reservation: Reservation | None, outcome: Outcome, cached: int | None) -> None:
        if reservation is None:
            return
        self.held.remove(reservation)
        self.router.finish(reservation, self.now, outcome, cached)
        with pytest.raises(ReservationError):
            self.router.finish(reservation, self.now, outcome, cached)

    @rule(passed_s=st.floats(0, 100))
    def wait(self, passed_s: float) -> None:
        self.now += passed_s

    @invariant()
    def sums_are_those_of_the_open_requests(self) -> None:
        for replica in {reservation.replica for reservation in self.held}:
            mine = [reservation for reservation in self.held if reservation.replica is replica]
            assert replica.inflight == len(mine)
            assert 0 <= replica.unadmitted_tokens <= replica.unanswered_tokens
            assert replica.unanswered_tokens <= sum(reservation.uncached_tokens for reservation in mine)

    def teardown(self) -> None:
        replicas = {reservation.replica for reservation in self.held} | set(self.router._replicas.values())
        random.Random(self.begun).shuffle(self.held)
        for reservation in self.held:
            self.router.finish(reservation, self.now, Outcome.OK, 0)
        for replica in replicas:
            assert (replica.inflight, replica.unanswered_tokens, replica.unadmitted_tokens) == (0, 0, 0)


TestPromises = Promises.TestCase
TestPromises.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
