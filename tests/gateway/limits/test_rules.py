"""Which limits a request is under, what it takes of them, and what a client is told."""

from __future__ import annotations

import math
import time

import msgspec
import pytest

from gateway.limits import LocalLimiter, Price, Quota, Refused, Reservation, Rules, limit_headers, refusal_error
from gateway.limits.headers import refusal_headers
from gateway.limits.ledger import Ledger, Limit, Measure
from gateway.openai import parse_request
from gateway.server.reply import error_headers

FULL = Quota(
    requests_per_minute=10, tokens_per_minute=1000, parallel_requests=2, tokens_per_day=50_000, usd_per_day=1.5
)


def names(limits: tuple[Limit, ...]) -> dict[str, int]:
    return {limit.counter: limit.most for limit in limits}


def test_a_request_is_under_the_limits_of_its_key_its_tenant_and_its_model() -> None:
    rules = Rules(tenants={"blue": Quota(parallel_requests=7)}, models={"m/x": Quota(tokens_per_minute=9)})
    caller = rules.caller("k1", FULL, "blue")

    assert names(caller.early) == {"key:k1:requests": 10, "key:k1:parallel": 2, "tenant:blue:parallel": 7}
    assert names(rules.limits(caller, "m/x")) == {
        "key:k1:requests": 10,
        "key:k1:tokens": 1000,
        "key:k1:parallel": 2,
        "key:k1:tokens_day": 50_000,
        "key:k1:usd_day": 1_500_000,
        "tenant:blue:parallel": 7,
        "model:m/x:tokens": 9,
    }
    assert rules.limits(caller, "another") == caller.limits
    assert rules.limits(rules.caller(None, None, "public"), "another") == ()


def test_a_key_has_the_default_where_it_has_no_limit_of_its_own() -> None:
    rules = Rules(Quota(requests_per_minute=5, parallel_requests=3))

    own = rules.caller("k1", Quota(requests_per_minute=9), "t")
    none = rules.caller("k2", None, "t")

    assert names(own.limits) == {"key:k1:requests": 9, "key:k1:parallel": 3}
    assert names(none.limits) == {"key:k2:requests": 5, "key:k2:parallel": 3}


def test_a_key_that_was_changed_has_its_new_limits_at_once() -> None:
    rules = Rules()
    before = rules.caller("k1", Quota(requests_per_minute=9), "t")

    after = rules.caller("k1", Quota(requests_per_minute=4), "t")

    assert (names(before.limits), names(after.limits)) == ({"key:k1:requests": 9}, {"key:k1:requests": 4})


def test_gateways_that_do_not_ask_each_other_have_a_share_each() -> None:
    rules = Rules(Quota(requests_per_minute=10, parallel_requests=2), share=4)

    assert names(rules.caller("k", None, "t").limits) == {"key:k:requests": 2, "key:k:parallel": 1}


@pytest.mark.parametrize(
    ("price", "prompt", "cached", "output", "micro_usd"),
    [
        (Price(input=0.15, output=0.6), 1000, 0, 1000, 750),
        (Price(input=0.15, output=0.6), 1, 0, 0, 1),
        (Price(input=3.0, cached_input=0.3, output=15.0), 1000, 900, 10, 300 + 270 + 150),
        (Price(input=3.0, output=15.0), 1000, 900, 10, 3000 + 150),
        (Price(input=1.0), 10, 99, 0, 10),
        (Price(), 1000, 0, 1000, 0),
    ],
)
def test_a_price_is_for_a_million_tokens(price: Price, prompt: int, cached: int, output: int, micro_usd: int) -> None:
    assert price.micro_usd(prompt, cached, output) == micro_usd


def test_money_is_reserved_at_its_worst_price() -> None:
    rules = Rules(prices={"m": Price(input=2.0, cached_input=0.5, output=10.0)}, reserved_output_tokens=100)

    assert rules.amounts("m", 1000, None, choices=3) == (1, 1300, 1, 1300, 5000)
    assert rules.amounts("m", 1000, 50, choices=2) == (1, 1100, 1, 1100, 3000)
    assert rules.used("m", 1000, 400, 20) == (1, 1020, 0, 1020, 1200 + 200 + 200)
    assert rules.amounts("free", 1000, 50) == (1, 1050, 1, 1050, 0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (b"", (None, 1)),
        (b',"max_tokens":5', (5, 1)),
        (b',"max_tokens":5,"max_completion_tokens":7,"n":3', (7, 3)),
        (b',"max_tokens":5000,"max_completion_tokens":1,"max_output_tokens":2', (5000, 1)),
        (b',"n":1,"best_of":20', (None, 20)),
        (b',"max_completion_tokens":null,"max_tokens":5,"n":null', (5, 1)),
        (b',"max_tokens":"5","n":-1', (5, 1)),
        (b',"max_tokens":1e3,"n":"2"', (1000, 2)),
        (b',"max_tokens":"x","n":true', (None, 1)),
        (b',"max_tokens":[5],"n":{}', (None, 1)),
        (b',"max_tokens":"nan","n":-0.0', (None, 1)),
        (b',"max_tokens":99999999999999999999999', (1 << 31, 1)),
        (b',"max_tokens":9007199254740991,"n":0', (1 << 31, 1)),
    ],
)
def test_what_a_request_may_generate_is_read_where_it_is_a_number(
    fields: bytes, expected: tuple[int | None, int]
) -> None:
    request = parse_request("/v1/chat/completions", b'{"model":"m","messages":[]' + fields + b"}", open_access=False)

    assert (request.max_tokens, request.choices) == expected


def test_no_amount_is_too_large_to_be_counted_exactly() -> None:
    rules = Rules(prices={"m": Price(output=1e6)})

    assert max(rules.amounts("m", 1 << 20, 1 << 31, choices=1 << 31)) == 1 << 50


def test_headers_tell_of_the_tightest_limit_of_each_kind() -> None:
    limiter = LocalLimiter(Ledger(math.inf), time.monotonic, time.time)
    rules = Rules(tenants={"t": Quota(requests_per_minute=4)}, models={"m": Quota(requests_per_minute=900)})
    limits = rules.limits(rules.caller("k", FULL, "t"), "m")

    verdict = limiter.try_reserve(limits, rules.amounts("m", 100, 50))

    assert isinstance(verdict, Reservation)
    assert limit_headers(verdict.limits, verdict.left) == [
        (b"x-ratelimit-limit-requests", b"4"),
        (b"x-ratelimit-remaining-requests", b"3"),
        (b"x-ratelimit-reset-requests", b"1m1s"),
        (b"x-ratelimit-limit-tokens", b"1000"),
        (b"x-ratelimit-remaining-tokens", b"850"),
        (b"x-ratelimit-reset-tokens", b"1m1s"),
    ]


@pytest.mark.parametrize(
    ("measure", "wait_s", "code", "type_", "should_retry"),
    [
        (Measure.REQUESTS, 12.3, "rate_limit_exceeded", "requests", None),
        (Measure.PARALLEL, 1.0, "rate_limit_exceeded", "requests", None),
        (Measure.TOKENS, 12.3, "rate_limit_exceeded", "tokens", None),
        (Measure.TOKENS, None, "rate_limit_exceeded", "tokens", b"false"),
        (Measure.TOKENS_DAY, 40_000.0, "insufficient_quota", "insufficient_quota", b"false"),
        (Measure.USD_DAY, 40_000.0, "insufficient_quota", "insufficient_quota", b"false"),
    ],
)
def test_what_a_refused_client_is_told(
    measure: Measure, wait_s: float | None, code: str, type_: str, should_retry: bytes | None
) -> None:
    error = refusal_error(Refused(Limit("tenant:t:x", measure, 2_500_000), wait_s, 30.0, 0))

    told = msgspec.json.decode(error.body())["error"]
    headers = dict(error_headers(error))
    assert error.status == 429
    assert (told["code"], told["type"]) == (code, type_)
    assert told["message"].startswith("This tenant may ")
    assert headers.get(b"x-should-retry") == should_retry
    assert headers.get(b"retry-after-ms") == (None if wait_s is None else b"%d" % (1000 * wait_s))


def test_a_refusal_says_when_the_whole_limit_is_free() -> None:
    refused = Refused(Limit("key:k:requests", Measure.REQUESTS, 10), 0.4, 0.0121, 3)

    assert refusal_headers(refused) == [
        (b"x-ratelimit-limit-requests", b"10"),
        (b"x-ratelimit-remaining-requests", b"3"),
        (b"x-ratelimit-reset-requests", b"13ms"),
    ]
    assert refusal_headers(Refused(Limit("key:k:parallel", Measure.PARALLEL, 10), 1.0, 1.0, 0)) == []


@pytest.mark.parametrize(
    "fields", [{"requests_per_minute": 0}, {"tokens_per_day": -1}, {"usd_per_day": 0}, {"per_second": 1}]
)
def test_a_quota_of_nothing_is_refused_when_it_is_read(fields: dict[str, int]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(fields, Quota)


def test_a_share_that_a_request_does_not_fit_into_may_fit_later() -> None:
    limiter = LocalLimiter(Ledger(math.inf), time.monotonic, time.time, share=4, is_fallback=True)
    tokens = Limit("key:k:tokens", Measure.TOKENS, 1000)

    refused = limiter.try_reserve([tokens], (1, 400, 1, 400, 0))

    assert isinstance(refused, Refused)
    assert refused.wait_s == 1.0
