"""What settings make of limits."""

from __future__ import annotations

import logging

import pytest

from gateway.limits import LeasingLimiter, LocalLimiter, Quota
from gateway.planes.limiter import build_limiter, limit_rules
from gateway.settings import Settings
from gateway.settings_loader import SettingsError, load_settings, redacted
from tests.gateway.limits.ledgers import Clock, supervised

URL = "redis://:hidden-password@127.0.0.1:1/0"


def most(settings: Settings) -> list[int]:
    return [limit.most for limit in limit_rules(settings).caller("k", Quota(requests_per_minute=100), "t").limits]


def settings(**values: object) -> Settings:
    return Settings.model_validate(values)


def test_one_process_keeps_its_own_ledger() -> None:
    assert isinstance(build_limiter(settings()), LocalLimiter)
    assert most(settings()) == [100]


def test_several_gateways_without_redis_have_a_share_each_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    several = settings(limits={"hosts": 4})

    with caplog.at_level(logging.WARNING):
        build_limiter(several)

    assert most(several) == [25]
    assert "one of 4 gateways" in caplog.text


def test_with_redis_limits_are_whole_however_many_gateways_there_are() -> None:
    several = settings(limits={"hosts": 4}, redis={"url": URL})

    assert isinstance(build_limiter(several), LeasingLimiter)
    assert most(several) == [100]


def test_several_processes_ask_their_supervisor() -> None:
    link, _ = supervised(Clock())

    assert isinstance(build_limiter(settings(), supervisor=link, processes=4), LeasingLimiter)


def test_the_password_of_redis_is_never_shown() -> None:
    assert "hidden-password" not in redacted(settings(redis={"url": URL}))


def test_a_url_of_something_else_is_refused_without_being_repeated() -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(flags={"redis": {"url": "http://user:hidden-password@host"}})

    assert caught.value.faults == ["redis.url: begins with redis://, rediss:// or unix://"]
