"""The routers to compare: ours with one of its policies, or any other one by its command line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["KNOWLEDGE", "POLICIES", "Arm", "Knowledge", "Ours", "Peer", "parse_peer"]

Knowledge = Literal["exact", "plain"]
"""exact: own workers with events. plain: the same workers taken for servers that speak OpenAI and tell nothing."""

KNOWLEDGE: Final[tuple[Knowledge, ...]] = ("exact", "plain")

POLICIES: Final = (
    "cost",
    "round_robin",
    "random",
    "least_load",
    "power_of_two",
    "consistent_hash",
    "prefix",
    "sticky_until_saturated",
)

_PLACES: Final = ("port", "spare_port", "workers")


@dataclass(frozen=True, slots=True)
class Ours:
    policy: str
    knowledge: Knowledge = "exact"
    processes: int = 1
    """Of each gateway."""
    gateways: int = 1
    """In front of the same replicas, with nothing else in common; clients take them in turn."""

    @property
    def name(self) -> str:
        marks = [
            *([self.knowledge] if self.knowledge != "exact" else []),
            *([f"{self.processes} processes"] if self.processes > 1 else []),
            *([f"{self.gateways} gateways"] if self.gateways > 1 else []),
        ]
        return f"{self.policy} ({', '.join(marks)})" if marks else self.policy


@dataclass(frozen=True, slots=True)
class Peer:
    """Another router. It sees the replicas as plain OpenAI servers."""

    name: str
    words: tuple[str, ...]
    """Of its command line, with places in braces."""

    def command(self, port: int, spare_port: int, workers: Sequence[str]) -> list[str]:
        """A word that is `{workers}` alone becomes a word for each URL; within a word the URLs are joined by commas."""
        values = {"port": str(port), "spare_port": str(spare_port), "workers": ",".join(workers)}
        found: list[str] = []
        for word in self.words:
            found += workers if word == "{workers}" else [re.sub(r"\{(\w+)\}", lambda place: values[place[1]], word)]
        return found


Arm = Ours | Peer


def parse_peer(text: str) -> Peer:
    """`NAME=COMMAND`. Raises ValueError with what is wrong."""
    name, _, command = text.partition("=")
    if not re.fullmatch(r"[\w.:+-]{1,40}", name):
        raise ValueError("write NAME=COMMAND, the name of letters, digits and .:+-_")
    words = tuple(shlex.split(command))
    places = {place for word in words for place in re.findall(r"\{(\w+)\}", word)}
    if unknown := places.difference(_PLACES):
        raise ValueError(f"{{{min(unknown)}}} is none of {', '.join(f'{{{place}}}' for place in _PLACES)}")
    if missing := {"port", "workers"}.difference(places):
        raise ValueError(f"the command has no {{{min(missing)}}}")
    return Peer(name, words)
