"""`warmpath smoke`: drive a running system with the official OpenAI client and say what was seen.

Two questions are asked. Is it an OpenAI endpoint: models, chat and text completions, streamed and not, exact usage? And does
the cache work: do three growing talks, turn by turn and interleaved, each stay on the replica that holds their past, and is
their first token sooner than without it? The second answer is a table. Any "no" ends with exit code 1.

"Without it" is measured on the same system: the same prompt sent with the key of another tenant, whose cache is another one.
"""

from __future__ import annotations

import re
import secrets
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, cast

import click
import httpx
import msgspec
from rich import box
from rich.console import Console
from rich.table import Column, Table

from loadtest.talks import Message, Talk, load_talks

try:
    from openai import OpenAI
except ImportError:
    sys.exit("Error: this needs the official client: use `make smoke`, or pip install openai")

__all__ = ["main"]

_BLOCK: Final = 16
_QUESTION: Final[list[Message]] = [{"role": "user", "content": "What is the capital of France?"}]
_MAX_REPEATS: Final = 4
"""How often what looks wrong about a time is measured again; the least time counts, with and without the cache."""
_TELLING_TOKENS: Final = 256
"""Fewer cached tokens save less than the time of a request varies: these save 9 ms on a simulated replica."""
_SEED: Final = 7
"""Of what is asked twice. A real model is asked at temperature 0, but a simulated one makes up its text from the seed."""
_SIMULATED: Final = "simulated"
"""What a simulated system calls its model: its text knows no capitals."""
_WIDTH: Final = 100


class SmokeFailure(Exception):
    """The system answered, and not as it should."""


class Connection(msgspec.Struct, frozen=True):
    """Where a system is and how to enter it; `warmpath up` writes it as .warmpath/connection.json."""

    base_url: str
    api_key: str
    admin_url: str
    admin_key: str


@dataclass(frozen=True, slots=True)
class Answer:
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    replica: str


@dataclass(frozen=True, slots=True)
class Row:
    """One turn of one talk, each time it was run."""

    talk: str
    turn: int
    warm: list[Answer] = field(default_factory=list)
    cold: list[Answer] = field(default_factory=list)

    @property
    def warm_ttft_s(self) -> float:
        """The least: what other work on the machine added is not the replica's."""
        return min(answer.ttft_s for answer in self.warm)

    @property
    def cold_ttft_s(self) -> float | None:
        """None for the first turn, which is not run so."""
        return min((answer.ttft_s for answer in self.cold), default=None)

    @property
    def is_slow(self) -> bool:
        """Whether the cache saved no time although it held enough to save some."""
        if self.cold_ttft_s is None or self.warm[-1].cached_tokens < _TELLING_TOKENS:
            return False
        return self.warm_ttft_s >= self.cold_ttft_s


def check(condition: bool, message: str) -> None:
    if not condition:
        raise SmokeFailure(message)


class Keys:
    """Client keys made for this run through the admin API, and taken back at its end."""

    def __init__(self, connection: Connection) -> None:
        self._base_url = connection.base_url
        self._admin = httpx.Client(
            base_url=f"{connection.admin_url}/admin/v1",
            headers={"authorization": f"Bearer {connection.admin_key}"},
            timeout=10,
        )
        self._made: list[str] = []

    def client(self, tenant: str) -> OpenAI:
        """A client of its own tenant, who sees how it is routed."""
        body = {"name": f"smoke-{secrets.token_hex(4)}", "tenant": tenant, "debug": True}
        body["limits"] = {"requests_per_minute": 6000}
        answer = self._admin.post("/keys", json=body).raise_for_status().json()
        self._made.append(answer["id"])
        return OpenAI(base_url=self._base_url, api_key=answer["key"], max_retries=0, timeout=120)

    def revoke_all(self) -> None:
        for key_id in self._made:
            self._admin.delete(f"/keys/{key_id}")
        self._admin.close()


def check_endpoint(client: OpenAI) -> str:
    """Everything a first user tries. Returns the model's name."""
    models = [model.id for model in client.models.list()]
    check(len(models) > 0, "models.list() is empty")
    model = models[0]
    _check_chat(client, model)
    _check_completion(client, model)
    return model


def _check_chat(client: OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": _QUESTION, "temperature": 0, "seed": _SEED, "max_tokens": 32}
    whole = client.chat.completions.create(**asked)
    text = whole.choices[0].message.content or ""
    check("Paris" in text or model == _SIMULATED, f"the capital of France is not in {text!r}")
    usage = whole.usage
    check(usage is not None and usage.completion_tokens > 0, "a whole answer has no usage")
    assert usage is not None
    check(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, "usage does not add up")

    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    check(streamed == text, f"streamed {streamed!r}, not {text!r}")
    last = chunks[-1]
    check(not last.choices and last.usage is not None, "the last chunk of a stream with usage is not the usage chunk")
    assert last.usage is not None
    check(
        (last.usage.prompt_tokens, last.usage.completion_tokens) == (usage.prompt_tokens, usage.completion_tokens),
        "usage of a stream and of a whole answer differ",
    )
    check(
        all(chunk.usage is None for chunk in client.chat.completions.create(**asked, stream=True)),
        "a stream shows usage that nobody asked for",
    )


def _check_completion(client: OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "prompt": "The sea is", "temperature": 0, "seed": _SEED, "max_tokens": 16}
    whole = client.completions.create(**asked)
    check(whole.usage is not None and whole.usage.completion_tokens <= 16, "a text completion has wrong usage")
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True))
    check(streamed == whole.choices[0].text, "streamed and whole text completion differ")


def run_talks(keys: Keys, model: str) -> list[Row]:
    """All talks, interleaved turn by turn, each turn measured with its past cached and without.

    Where the cache seems to save no time, that is measured again: a talk is repeated by another tenant, whose cache is empty
    when it begins.
    """
    talks = load_talks()
    turns = list(_interleaved(talks))
    rows = [Row(talk.name, turn) for turn, talk, _ in turns]
    client = keys.client("smoke-talks")
    first = [messages for turn, _, messages in turns if turn == 1]
    with ThreadPoolExecutor(len(first)) as together:  # at once, so that the talks begin on different replicas
        beginnings = list(together.map(partial(_ask, client, model), first))
    for number, (row, (_, _, messages)) in enumerate(zip(rows, turns, strict=True)):
        row.warm.append(beginnings[number] if number < len(first) else _ask(client, model, messages))
        _ask_cold(keys, model, row, messages)
    for repeat in range(_MAX_REPEATS):
        slow = [row for row in rows if row.is_slow]
        for talk in (talk for talk in talks if any(row.talk == talk.name for row in slow)):
            client = keys.client(f"smoke-again-{repeat}")
            for row, (_, _, messages) in zip(rows, turns, strict=True):
                if row.talk == talk.name:
                    row.warm.append(_ask(client, model, messages))
                    if row in slow:
                        _ask_cold(keys, model, row, messages)
    return rows


def _ask_cold(keys: Keys, model: str, row: Row, messages: list[Message]) -> None:
    """Turn 1 has no past, so nothing to compare."""
    if row.turn > 1:
        row.cold.append(_ask(keys.client(f"smoke-cold-{row.talk[:3]}-{row.turn}-{len(row.cold)}"), model, messages))


def _interleaved(talks: list[Talk]) -> Iterator[tuple[int, Talk, list[Message]]]:
    """First turns of all talks, second turns of all talks, ..."""
    for turn, chats in enumerate(zip_longest(*(talk.turns() for talk in talks)), start=1):
        for talk, messages in zip(talks, chats, strict=True):
            if messages is not None:
                yield turn, talk, messages


def _ask(client: OpenAI, model: str, messages: list[Message]) -> Answer:
    started = time.perf_counter()
    raw = client.chat.completions.with_raw_response.create(
        model=model,
        messages=cast(Any, messages),  # plain JSON, as a user would write it
        temperature=0,
        max_tokens=1,
        stream=True,
        stream_options={"include_usage": True},
    )
    ttft_s: float | None = None
    usage = None
    for chunk in raw.parse():
        if chunk.choices and ttft_s is None:
            ttft_s = time.perf_counter() - started
        usage = chunk.usage or usage
    check(ttft_s is not None and usage is not None, "a stream ended without a token or without usage")
    assert ttft_s is not None
    assert usage is not None
    details = usage.prompt_tokens_details
    check(details is not None and details.cached_tokens is not None, "usage does not tell the cached tokens")
    assert details is not None
    decision = raw.headers.get("x-warmpath-decision", "")
    replica = re.search(r'replica="([^"]*)"', decision)
    check(replica is not None, f"x-warmpath-decision names no replica: {decision!r}")
    assert replica is not None
    return Answer(ttft_s, usage.prompt_tokens, details.cached_tokens or 0, replica[1])


def faults(rows: Iterable[Row]) -> list[str]:
    """What the table shows that should not be."""
    found: list[str] = []
    past: dict[str, Row] = {}
    for row in rows:
        before = past.get(row.talk)
        past[row.talk] = row
        if before is None:
            continue
        where = f"{row.talk}, turn {row.turn}"
        for last, now in zip(before.warm, row.warm, strict=True):
            cacheable = last.prompt_tokens // _BLOCK * _BLOCK
            moved = now.replica != last.replica
            if moved and cacheable < _TELLING_TOKENS:
                continue  # so short a past is computed again sooner than the other replica's last token is written
            if moved:
                found.append(f"{where}: went from {last.replica} to {now.replica}")
            if now.cached_tokens < 0.9 * cacheable:
                found.append(f"{where}: {now.cached_tokens} tokens cached of {cacheable}")
        if row.is_slow:
            assert row.cold_ttft_s is not None
            found.append(f"{where}: first token after {row.warm_ttft_s:.3f} s, uncached {row.cold_ttft_s:.3f} s")
    return found


def table(rows: Iterable[Row]) -> Table:
    names = ("talk", "turn", "replica", "prompt tokens", "cached tokens", "TTFT ms", "uncached ms")
    shown = Table(*(Column(name, no_wrap=True) for name in names), box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        last = row.warm[-1]
        shown.add_row(
            row.talk,
            str(row.turn),
            last.replica,
            str(last.prompt_tokens),
            str(last.cached_tokens),
            f"{row.warm_ttft_s * 1000:.0f}",
            f"{row.cold_ttft_s * 1000:.0f}" if row.cold_ttft_s is not None else "–",
        )
    return shown


@click.command(
    epilog="""\b
Examples:
  warmpath smoke                                       # the system that `warmpath up` runs here
  warmpath smoke --connection /srv/warmpath/connection.json
"""
)
@click.option(
    "--connection",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path(".warmpath/connection.json"),
    show_default=True,
    help="File with base_url, api_key, admin_url and admin_key.",
)
def main(connection: Path) -> None:
    """Check a running system with the official OpenAI client, and show what its cache saves."""
    console = Console(width=_WIDTH)
    try:
        known = msgspec.json.decode(connection.read_bytes(), type=Connection)
    except (OSError, msgspec.MsgspecError) as error:
        raise click.ClickException(f"no running system found ({error}); start one with `warmpath up`") from error
    keys = Keys(known)
    try:
        model = check_endpoint(keys.client("smoke"))
        console.print(f"endpoint ok: {model}, chat and text, streamed and whole, usage exact")
        rows = run_talks(keys, model)
        console.print(table(rows))
        wrong = faults(rows)
    except (SmokeFailure, httpx.HTTPError) as error:
        wrong = [str(error)]
    finally:
        keys.revoke_all()
    for fault in wrong:
        console.print(f"[red]wrong:[/] {fault}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
