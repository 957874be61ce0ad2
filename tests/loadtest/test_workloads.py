import random

from loadtest.workloads import Request, ideal_cached_tokens, make_workload, shared_prompts


def test_the_recorded_trace_keeps_its_lengths_times_and_shared_prefixes() -> None:
    requests = make_workload("trace", load=1.0, seed=1).requests

    assert len(requests) == 1000
    assert [request.prompt_tokens for request in requests[:3]] == [6758, 7322, 7236]
    assert requests[-1].at_s == 330.0 / 4
    assert requests[0].prompt[:2048] == requests[1].prompt[:2048] != requests[1].prompt[2048:4096]


def test_requests_of_the_trace_that_share_more_than_the_first_block_are_one_session() -> None:
    requests = make_workload("trace", load=1.0, seed=1).requests

    by_prefix = {(request.prompt[:4096], request.session) for request in requests if request.prompt_tokens >= 1024}

    assert len(by_prefix) == len({prefix for prefix, _ in by_prefix}) == len({session for _, session in by_prefix})


def test_load_is_times_the_rate() -> None:
    usual, double = (make_workload("trace", load=load, seed=1).requests for load in (1.0, 2.0))

    assert [request.at_s for request in double] == [request.at_s / 2 for request in usual]


def test_shared_prefixes_are_sent_once_before_the_ones_that_count() -> None:
    requests = make_workload("shared", load=1.0, seed=1).requests

    warm = [request for request in requests if request.warm]
    counted = [request for request in requests if not request.warm]
    assert len({request.prompt for request in warm}) == len(warm) == 320
    assert len({request.prompt[:24_000] for request in warm}) == 64
    assert {request.prompt_tokens for request in requests} == {7200}
    assert 1000 < len(counted) < 1400, "60 a second for 20 s"
    assert max(request.at_s for request in warm) < min(request.at_s for request in counted)


def test_rates_follow_each_other() -> None:
    requests = make_workload("shared", load=2.0, seed=1, rates=[10, 30]).requests

    steps = {step: [request.at_s for request in requests if request.step == step] for step in ("20/s", "60/s")}
    assert 320 < len(steps["20/s"]) < 480 < 1000 < len(steps["60/s"]) < 1400
    assert max(steps["20/s"]) < min(steps["60/s"])
    assert len(requests) == 320 + len(steps["20/s"]) + len(steps["60/s"])


def test_scaled_prompts_still_share_their_groups_prefix() -> None:
    made = shared_prompts(random.Random(1), 0.1)

    assert {len(prompt) // 4 for _, prompt in made} == {720}
    assert len({(group, prompt[:2400]) for group, prompt in made}) == 64


def test_chats_grow() -> None:
    requests = make_workload("chats", load=1.0, seed=1).requests

    ideal = ideal_cached_tokens(requests)

    assert sum(ideal) > 0.7 * sum(request.prompt_tokens for request in requests)
    assert [request.at_s for request in requests] == sorted(request.at_s for request in requests)


def test_a_seed_makes_the_same_load() -> None:
    for name in ("shared", "chats", "trace"):
        assert make_workload(name, load=1.0, seed=5, limit=9) == make_workload(name, load=1.0, seed=5, limit=9)
        assert make_workload(name, load=1.0, seed=5, limit=9) != make_workload(name, load=1.0, seed=6, limit=9)


def test_the_ideal_counts_whole_blocks_and_never_the_last_token() -> None:
    prompts = ["a" * 64 * 3, "a" * 64 * 3, "a" * 64 * 2 + "b" * 100, "b" * 64]

    ideal = ideal_cached_tokens([Request(0.0, prompt, 1) for prompt in prompts])

    assert ideal == [0, 32, 32, 0]
