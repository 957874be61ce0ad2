import pytest

from router.settings import RoutingSettings


def test_the_defaults_are_valid() -> None:
    assert RoutingSettings().policy == "cost"


def test_every_fault_is_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"policy is 'best'.*prefill_tok_s is 0.*learned_ttl_s is nan.*max_w is 0.5"):
        RoutingSettings(policy="best", prefill_tok_s=0, learned_ttl_s=float("nan"), max_w=0.5)  # type: ignore[arg-type]


def test_what_can_be_switched_off_may_be_zero() -> None:
    RoutingSettings(fixed_s=0, running_s=0, w_per_wait_s=0, tie_ratio=0, learned_tokens=0)
