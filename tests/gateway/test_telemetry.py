import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from gateway.job import Record
from gateway.openai import Usage, parse_usage
from gateway.telemetry import GapHistogram, Telemetry, render
from router import BlockName, Decision, Outcome, Query, Router
from router.wire import Batch, Hello, Load, ReplicaSpec
from tests.gateway.stub import gateway, says, stub

HELLO = Hello(
    epoch="e",
    seq=0,
    model="m",
    block_size=16,
    tokenizer_digest="t",
    numerics="n",
    capacity_blocks=500,
    max_num_seqs=8,
    started_at=0.0,
)
LOAD = Load(
    seq=0,
    ts=0.0,
    waiting=3,
    waiting_uncached_tokens=900,
    running=2,
    kv_used_blocks=40,
    prefill_tok_s=1234.0,
    step_ms=5.0,
)


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry()


def a_router() -> Router:
    router = Router()
    router.add("w1", ReplicaSpec(url="http://127.0.0.1:8101", model="m", epoch="e", credential="s3cret"), now=0.0)
    router.set_health("w1", True, now=0.0)
    return router


def decision(matched: int = 0) -> Decision:
    return Decision("w1", matched, 100, "longest_match", 1.0, "cost", ())


def usage(prompt: int, completion: int, cached: int | None) -> Usage:
    details = "null" if cached is None else f'{{"cached_tokens": {cached}}}'
    body = f'{{"usage": {{"prompt_tokens": {prompt}, "completion_tokens": {completion}, "prompt_tokens_details": {details}}}}}'
    found = parse_usage(body.encode())
    assert found is not None
    return found


def record(**changes: object) -> Record:
    made = Record(request_id="r", endpoint="/v1/completions", started_at=0.0)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def samples(telemetry: Telemetry, router: Router | None = None, in_flight: int = 0) -> dict[str, float]:
    text = render(telemetry.families(in_flight), router.replicas() if router else [], now=100.0).decode()
    return {
        sample.name + "".join(f"|{key}={value}" for key, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_good_request_is_counted_in_all_its_parts(telemetry: Telemetry) -> None:
    telemetry.finished(
        record(
            model="m",
            status=200,
            decision=decision(matched=64),
            tries=2,
            first_byte_s=0.3,
            duration_s=1.5,
            usage=usage(100, 20, cached=48),
        )
    )

    seen = samples(telemetry)

    assert seen["warmpath_requests_total|model=m|status=200"] == 1
    assert seen["warmpath_decisions_total|model=m|policy=cost|reason=longest_match"] == 1
    assert seen["warmpath_retries_total|model=m"] == 1
    assert seen["warmpath_time_to_first_token_seconds_bucket|le=0.25|model=m"] == 0
    assert seen["warmpath_time_to_first_token_seconds_bucket|le=0.5|model=m"] == 1
    assert seen["warmpath_request_duration_seconds_sum|model=m"] == 1.5
    assert seen["warmpath_prompt_tokens_total|model=m"] == 100
    assert seen["warmpath_completion_tokens_total|model=m"] == 20
    assert seen["warmpath_cached_tokens_predicted_total|model=m"] == 64
    assert seen["warmpath_cached_tokens_reported_total|model=m"] == 48
    assert seen["warmpath_cached_tokens_agreed_total|model=m"] == 48


def test_a_prediction_nobody_confirms_is_not_counted_as_wrong(telemetry: Telemetry) -> None:
    telemetry.finished(record(model="m", status=200, decision=decision(matched=64), tries=1, usage=usage(100, 1, None)))

    assert samples(telemetry)["warmpath_cached_tokens_predicted_total|model=m"] == 0


def test_a_refused_request_reaches_no_model(telemetry: Telemetry) -> None:
    telemetry.finished(record(status=401, error_code="invalid_api_key"))
    telemetry.finished(record(status=429, error_code="rate_limit_exceeded", limit="requests"))

    seen = samples(telemetry)

    assert seen["warmpath_requests_total|model=|status=401"] == 1
    assert seen["warmpath_limit_refusals_total|limit=requests"] == 1
    assert not any(name.startswith("warmpath_decisions") and value for name, value in seen.items())


def test_failed_tries_are_counted_by_their_reason(telemetry: Telemetry) -> None:
    telemetry.upstream_failed("m", "upstream_timeout")
    telemetry.upstream_failed("m", "upstream_timeout")

    assert samples(telemetry)["warmpath_upstream_errors_total|model=m|reason=upstream_timeout"] == 2


def test_inter_token_times_fall_into_the_bucket_that_holds_them(telemetry: Telemetry) -> None:
    for seconds in (0.01, 0.0101, 2.5, 3.0):
        telemetry.gap("m", seconds)

    seen = samples(telemetry)

    bucket = "warmpath_inter_token_seconds_bucket|le={}|model=m"
    assert [seen[bucket.format(bound)] for bound in ("0.01", "0.025", "1.0", "2.5", "+Inf")] == [1, 2, 2, 3, 4]
    assert seen["warmpath_inter_token_seconds_count|model=m"] == 4
    assert seen["warmpath_inter_token_seconds_sum|model=m"] == pytest.approx(5.5201)


def test_the_hand_made_histogram_is_one_that_the_library_accepts() -> None:
    registry = CollectorRegistry()
    gaps = GapHistogram()
    registry.register(gaps)

    gaps.observe("m", 0.2)

    assert registry.get_sample_value("warmpath_inter_token_seconds_count", {"model": "m"}) == 1


def test_replicas_are_shown_as_they_are_now(telemetry: Telemetry) -> None:
    router = a_router()
    router.apply("w1", HELLO, now=1.0)
    router.apply("w1", LOAD, now=1.0)
    router.patch("w1", cordoned=True)

    seen = samples(telemetry, router, in_flight=7)

    labels = "|model=m|replica=w1"
    assert {
        name: seen[f"warmpath_replica_{name}{labels}"]
        for name in (
            "healthy",
            "cordoned",
            "draining",
            "ejected",
            "mismatched",
            "inflight_requests",
            "running_requests",
            "waiting_requests",
            "waiting_uncached_tokens",
            "kv_used_blocks",
            "kv_capacity_blocks",
            "prefill_tokens_per_second",
        )
    } == {
        "healthy": 1,
        "cordoned": 1,
        "draining": 0,
        "ejected": 0,
        "mismatched": 0,
        "inflight_requests": 0,
        "running_requests": 2,
        "waiting_requests": 3,
        "waiting_uncached_tokens": 900,
        "kv_used_blocks": 40,
        "kv_capacity_blocks": 500,
        "prefill_tokens_per_second": 1234,
    }
    assert seen["warmpath_replica_trust|model=m|replica=w1|trust=exact"] == 1
    assert seen["warmpath_replica_trust|model=m|replica=w1|trust=blind"] == 0
    assert seen["warmpath_requests_in_flight"] == 7


def test_a_replica_that_tells_nothing_has_no_such_series(telemetry: Telemetry) -> None:
    seen = samples(telemetry, a_router())

    assert "warmpath_replica_healthy|model=m|replica=w1" in seen
    assert "warmpath_replica_running_requests|model=m|replica=w1" not in seen


def test_what_was_learned_of_a_foreign_replica_is_shown(telemetry: Telemetry) -> None:
    router = Router()
    router.add("f1", ReplicaSpec(url="http://127.0.0.1:8101", model="m", kind="openai"), now=0.0)
    router.set_health("f1", True, now=0.0)
    query = Query(model="m", names=[BlockName(number) for number in range(10)], num_tokens=640, num_bytes=2560)
    for now in (0.0, 10.0):
        asked = router.route(query, now, 0.0)
        assert isinstance(asked, Decision)
        reservation = router.begin(asked, query, "r", now)
        router.answered(reservation, now + 0.52)
        router.finish(reservation, now + 1, Outcome.OK, 0 if not now else 400, prompt_tokens=512)

    seen = samples(telemetry, router)

    labels = "|model=m|replica=f1"
    assert seen[f"warmpath_replica_bytes_per_token{labels}"] == 5
    assert 500 < seen[f"warmpath_replica_prefill_tokens_per_second{labels}"] < 8000
    assert 0 < seen[f"warmpath_replica_fixed_seconds{labels}"] < 0.5
    assert seen[f"warmpath_replica_expected_blocks{labels}"] == 10
    assert seen[f"warmpath_replica_capacity_tokens{labels}"] == pytest.approx(1 << 20, rel=0.01)
    assert seen[f"warmpath_replica_cached_tokens_precision{labels}"] == 1
    assert 0.9 < seen[f"warmpath_replica_cached_tokens_recall{labels}"] < 1


def test_more_cached_tokens_than_a_prompt_has_are_not_counted(telemetry: Telemetry) -> None:
    answered = record(model="m", decision=decision(matched=64), tries=1, usage=usage(100, 1, 10**9))

    telemetry.finished(answered)

    assert samples(telemetry)["warmpath_cached_tokens_reported_total|model=m"] == 100


def test_a_replica_that_left_leaves_no_series(telemetry: Telemetry) -> None:
    router = a_router()
    samples(telemetry, router)
    router.remove("w1")

    assert not any("replica=w1" in name for name in samples(telemetry, router))


def test_made_up_models_cannot_make_up_series_without_end(telemetry: Telemetry) -> None:
    for number in range(300):
        telemetry.finished(record(model=f"m{number}", status=200))
        telemetry.gap(f"m{number}", 0.1)

    seen = samples(telemetry)

    assert seen["warmpath_requests_total|model=other|status=200"] == 300 - 256
    assert seen["warmpath_inter_token_seconds_count|model=other"] == 300 - 256
    assert sum(name.startswith("warmpath_requests_total") for name in seen) == 257


def test_two_gateways_in_one_process_count_apart() -> None:
    one, other = Telemetry(), Telemetry()

    one.finished(record(status=200))

    assert samples(one)["warmpath_requests_total|model=|status=200"] == 1
    assert "warmpath_requests_total|model=|status=200" not in samples(other)


def names(telemetry: Telemetry) -> Iterator[str]:
    for line in render(telemetry.families(0), a_router().replicas(), 100.0).decode().splitlines():
        if line.startswith("# TYPE "):
            yield line.split()[2]


def test_names_follow_the_conventions_of_prometheus(telemetry: Telemetry) -> None:
    found = [name for name in names(telemetry) if not name.startswith("process_")]

    assert len(found) == len(set(found)) > 20
    assert all(re.fullmatch(r"warmpath_[a-z_]+", name) for name in found)
    assert not any(name.endswith(("_ms", "_milliseconds", "_percent")) for name in found)


def test_a_model_or_replica_name_cannot_break_the_format(telemetry: Telemetry) -> None:
    telemetry.finished(record(model='m"\n# evil\\', status=200))

    assert samples(telemetry)['warmpath_requests_total|model=m"\n# evil\\|status=200'] == 1


def test_no_credential_is_shown(telemetry: Telemetry) -> None:
    assert b"s3cret" not in render(telemetry.families(0), a_router().replicas(), 100.0)


def test_the_routers_reasons_are_a_fixed_set(telemetry: Telemetry) -> None:
    """They are label values: `longest_match` and its like, never text with ids or numbers in it."""
    router = a_router()
    found = router.route(Query(model="m", names=[], num_tokens=10), now=0.0, draw=0.0)

    assert isinstance(found, Decision)
    assert re.fullmatch(r"[a-z_]+", found.reason)


def test_breakers_event_streams_and_their_age_are_shown() -> None:
    router = a_router()
    query = Query(model="m", names=[], num_tokens=10)
    router.apply("w1", HELLO, now=90.0)
    router.apply("w1", LOAD, now=98.5)
    router.apply("w1", Batch(seq=5, ts=0.0), now=98.5)
    for _ in range(5):
        found = router.route(query, now=98.0, draw=0.0)
        assert isinstance(found, Decision)
        router.finish(router.begin(found, query, "r", now=98.0), 99.0, Outcome.FAILED, None)

    seen = samples(Telemetry(), router)

    labels = "model=m|replica=w1"
    assert seen[f"warmpath_replica_breaker|{labels}|state=open"] == 1
    assert seen[f"warmpath_replica_breaker|{labels}|state=closed"] == 0
    assert seen[f"warmpath_replica_breaker_transitions_total|{labels}"] == 1
    assert seen[f"warmpath_replica_event_age_seconds|{labels}"] == 1.5
    assert seen[f"warmpath_replica_event_gaps_total|{labels}"] == 1


def test_others_can_show_what_they_count(telemetry: Telemetry) -> None:
    telemetry.register("gauge", "warmpath_wanted", "Wanted.", ["model"], lambda: {("m",): 3})
    telemetry.register("counter", "warmpath_lost", "Lost.", [], lambda: {(): 2})

    seen = samples(telemetry)

    assert seen["warmpath_wanted|model=m"] == 3
    assert seen["warmpath_lost_total"] == 2


def test_clients_that_try_again_are_counted(telemetry: Telemetry) -> None:
    telemetry.finished(record(status=200, client_retries=2))
    telemetry.finished(record(status=200))

    assert samples(telemetry)["warmpath_client_retries_total"] == 1


async def test_ten_thousand_random_paths_and_models_make_no_series(tmp_path: Path) -> None:
    async with stub(says("hi")) as replica, gateway(tmp_path, replica) as running:
        await running.chat(model="made-up")
        before = (await running.admin.get("/metrics")).text.count("\n")
        scope: dict[str, Any] = {"type": "http", "http_version": "1.1", "headers": [], "query_string": b""}
        headers = [(b"authorization", running.auth["authorization"].encode()), (b"content-type", b"application/json")]

        async def send(message: Any) -> None:
            pass

        for number in range(10_000):
            body = b'{"model": "made-up-%d", "messages": []}' % number

            async def receive(body: bytes = body) -> Any:
                return {"type": "http.request", "body": body, "more_body": False}

            if number % 10 == 0:
                hostile = {**scope, "method": "GET", "path": f"/made/up/{number}"}
                await running.gateway.public(hostile, receive, send)
            else:
                model = {**scope, "method": "POST", "path": "/v1/chat/completions", "headers": headers}
                await running.gateway.public(model, receive, send)
        after = (await running.admin.get("/metrics")).text

    assert "made" not in after
    assert after.count("\n") == before
