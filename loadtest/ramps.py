"""A shape for locust: users in steps. `locust -f loadtest/locustfile.py,loadtest/ramps.py --ramp 10:30,20:30,40:30`

A file of its own, because locust obeys every shape that it finds, and then neither -u nor -t.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from locust import LoadTestShape, events
from locust.argument_parser import LocustArgumentParser

__all__ = ["Ramp", "Step", "parse_ramp", "users_at"]


@dataclass(frozen=True, slots=True)
class Step:
    users: int
    seconds: float


def parse_ramp(text: str) -> list[Step]:
    """`USERS:SECONDS,…`. Raises ArgumentTypeError."""
    steps = []
    for part in text.split(","):
        users, _, seconds = part.partition(":")
        try:
            steps.append(Step(int(users), float(seconds)))
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{part!r} is no USERS:SECONDS") from error
        if steps[-1].users < 1 or not 0 < steps[-1].seconds < float("inf"):
            raise argparse.ArgumentTypeError(f"{part!r}: both must be above 0")
    return steps


def users_at(steps: list[Step], elapsed_s: float) -> int | None:
    """How many there should be; None when the ramp is over."""
    for step in steps:
        if elapsed_s < step.seconds:
            return step.users
        elapsed_s -= step.seconds
    return None


def _checked(text: str) -> str:
    """A text still: locust's web page hands back what its users typed."""
    parse_ramp(text)
    return text


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def _add_options(parser: LocustArgumentParser) -> None:
    parser.add_argument(
        "--ramp", type=_checked, default="5:30,10:30,20:30", help="users and for how many seconds, step by step"
    )
    parser.add_argument("--ramp-spawn-rate", type=float, default=10.0, help="users that start a second")


class Ramp(LoadTestShape):
    def tick(self) -> tuple[int, float] | None:
        assert self.runner is not None, "locust sets it before the first tick"
        options = self.runner.environment.parsed_options
        assert options is not None, "locust parses its options first"
        users = users_at(parse_ramp(options.ramp), self.get_run_time())  # type: ignore[no-untyped-call]
        return None if users is None else (users, options.ramp_spawn_rate)
