"""What somebody may use. Pure values; `gateway.limits.rules` says whose they are."""

from __future__ import annotations

from typing import Annotated

import msgspec

__all__ = ["Quota"]

_Requests = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class Quota(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one key, tenant or model. None is no limit; 0 is refused, since people mean both by it."""

    requests_per_minute: _Requests | None = None
    tokens_per_minute: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)] | None = None
    """Prompt and answer together."""
    parallel_requests: _Requests | None = None
    tokens_per_day: Annotated[int, msgspec.Meta(ge=1, le=1 << 50)] | None = None
    """From midnight to midnight, UTC, as the next one."""
    usd_per_day: Annotated[float, msgspec.Meta(gt=0, le=1e9)] | None = None

    @property
    def micro_usd_per_day(self) -> int | None:
        """As it is counted: whole millionths of a dollar, at least one."""
        return None if self.usd_per_day is None else max(1, round(self.usd_per_day * 1e6))

    def over(self, default: Quota) -> Quota:
        """This quota, and the default's where it says nothing."""
        if default == Quota():
            return self
        return Quota(
            **{
                name: default_value if (value := getattr(self, name)) is None else value
                for name, default_value in msgspec.structs.asdict(default).items()
            }
        )
