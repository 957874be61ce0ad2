"""Load from locust, on its web page or headless: shared prefixes, growing chats, free chat.

    locust -f loadtest/locustfile.py --host http://127.0.0.1:8000                       # then open http://127.0.0.1:8089
    locust -f loadtest/locustfile.py --host http://127.0.0.1:8000 --headless -u 20 -r 5 -t 60s --csv run SharedPrefixes
    locust -f loadtest/locustfile.py,loadtest/ramps.py --host … --headless --ramp 10:30,20:30,40:30 FreeChat

Name the kinds of users to have only those. The key is taken from --api-key or OPENAI_API_KEY. Beside locust's own row
(POST: the whole answer) each request reports TTFT, to its first text, and ITL, the mean time between two tokens after it.

Users wait for their answers, so a slow system gets less load: to compare systems, `warmpath bench fleet` sends by the clock.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import gevent
import msgspec
from locust import FastHttpUser, between, events, task
from locust.argument_parser import LocustArgumentParser
from locust.contrib.fasthttp import FAILURE_EXCEPTIONS, ResponseContextManager
from locust.exception import StopUser

from loadtest.talks import Message, load_talks
from loadtest.workloads import shared_prompts

__all__ = ["FreeChat", "GrowingChats", "SharedPrefixes"]

_TURNS: Final = 8
_TURN_TOKENS: Final = (64, 1200)
_SYSTEM_TOKENS: Final = 320
_TOKEN_BYTES: Final = 4

_TALKS: Final = load_talks()
_numbers = itertools.count()


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def _add_options(parser: LocustArgumentParser) -> None:
    parser.add_argument("--api-key", env_var="OPENAI_API_KEY", default="none", is_secret=True, help="of the gateway")
    parser.add_argument("--model", default="", help="by default the first one that is listed")
    parser.add_argument("--max-tokens", type=int, default=100, help="of each answer")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="of made prompts' lengths, for models with short contexts"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")


@events.init.add_listener  # type: ignore[untyped-decorator]
def _start_the_clock(**_: object) -> None:
    """The loop last looked at the clock before the imports, and --run-time would count from there."""
    gevent.get_hub().loop.update_now()


class _BadStream(Exception):
    """An answer that did not come as it should."""


class _Event(msgspec.Struct):
    choices: list[dict[str, Any]] = []
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


@dataclass(slots=True)
class _Answer:
    first_at: float = 0.0
    last_at: float = 0.0
    pieces: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _OpenAiUser(FastHttpUser):
    abstract = True
    network_timeout = 120.0
    wait_time = between(0.5, 1.5)

    def on_start(self) -> None:
        options = self.environment.parsed_options
        assert options is not None, "locust parses its options before users start"
        self._options = options
        self._headers = {"authorization": f"Bearer {options.api_key}"}
        self._draw = random.Random(f"{options.seed} {next(_numbers)}")
        self._model = options.model or self._first_model()

    def _first_model(self) -> str:
        with self.client.get("/v1/models", headers=self._headers, catch_response=True) as answer:
            if answer.ok:
                return str(answer.json()["data"][0]["id"])
            answer.failure(f"no list of models: status {answer.status_code}")
        raise StopUser

    def _ask(self, path: str, name: str, prompt: dict[str, Any]) -> str:
        """Send it, report its times, and return the answer's text; '' where it failed."""
        body = {
            **prompt,
            "model": self._model,
            "max_tokens": self._options.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began = time.perf_counter()
        with self.client.post(
            path, json=body, headers=self._headers, name=name, stream=True, catch_response=True
        ) as response:
            try:
                answer = _read(response)
            except (_BadStream, *FAILURE_EXCEPTIONS) as error:
                response.failure(error)
                return ""
            response.request_meta["response_time"] = (time.perf_counter() - began) * 1000  # locust's is to the headers
            response.request_meta["response_length"] = answer.completion_tokens
        self._report("TTFT", name, answer.first_at - began, answer.prompt_tokens)
        if answer.completion_tokens > 1:
            gap_s = (answer.last_at - answer.first_at) / (answer.completion_tokens - 1)
            self._report("ITL", name, gap_s, answer.completion_tokens)
        return "".join(answer.pieces)

    def _report(self, kind: str, name: str, seconds: float, tokens: int) -> None:
        self.environment.events.request.fire(
            request_type=kind,
            name=name,
            response_time=seconds * 1000,
            response_length=tokens,
            exception=None,
            context=self.context(),
        )


def _read(response: ResponseContextManager) -> _Answer:
    """The whole stream. Raises _BadStream, and what locust's client raises."""
    response.raise_for_status()  # type: ignore[no-untyped-call]
    answer, done = _Answer(), False
    for data in _events(response):  # to its very end, or the connection could not be used again
        if data == b"[DONE]":
            done = True
            continue
        event = msgspec.json.decode(data, type=_Event)
        if event.error is not None:
            raise _BadStream(f"error event: {event.error.get('code')}")
        if event.usage is not None:
            answer.prompt_tokens = event.usage["prompt_tokens"]
            answer.completion_tokens = event.usage["completion_tokens"]
        if text := "".join(_text(choice) for choice in event.choices):
            answer.last_at = time.perf_counter()
            answer.first_at = answer.first_at or answer.last_at
            answer.pieces.append(text)
    if not done or not answer.pieces:
        raise _BadStream("the stream was cut" if not done else "no text")
    return answer


def _events(response: ResponseContextManager) -> Iterator[bytes]:
    """Line by line as they come: locust's own `iter_lines` waits for 1,024 bytes, which would be told as time to the token."""
    while line := response.stream.readline(b"\n"):
        if line.startswith(b"data:"):
            yield bytes(line[5:].strip())


def _text(choice: dict[str, Any]) -> str:
    return choice.get("text") or choice.get("delta", {}).get("content") or ""


class SharedPrefixes(_OpenAiUser):
    """64 groups, each with a long prompt of its own in front of one of five questions."""

    def on_start(self) -> None:
        super().on_start()
        made = shared_prompts(random.Random(self._options.seed), self._options.scale)
        self._prompts = [prompt for _, prompt in made]

    @task
    def ask(self) -> None:
        self._ask("/v1/completions", "shared prefix", {"prompt": self._draw.choice(self._prompts)})


class GrowingChats(_OpenAiUser):
    """Talks in which each prompt is the one before, its answer, and something new."""

    def on_start(self) -> None:
        super().on_start()
        self._turns_left = 0

    @task
    def ask(self) -> None:
        if not self._turns_left:
            self._prompt = self._made_text(random.Random(self._options.seed), _SYSTEM_TOKENS)
            self._turns_left = _TURNS
        self._prompt += self._made_text(self._draw, self._draw.randint(*_TURN_TOKENS))
        self._prompt += self._ask("/v1/completions", "growing chat", {"prompt": self._prompt})
        self._turns_left -= 1

    def _made_text(self, draw: random.Random, tokens: int) -> str:
        return draw.randbytes(int(tokens * self._options.scale) * _TOKEN_BYTES // 2).hex()


class FreeChat(_OpenAiUser):
    """Says what the customers of real talks said; the answers are the model's own."""

    def on_start(self) -> None:
        super().on_start()
        self._to_say: list[Message] = []

    @task
    def ask(self) -> None:
        if not self._to_say:
            said = [message for message in self._draw.choice(_TALKS).messages if message["role"] == "user"]
            self._to_say, self._messages = said[::-1], list[Message]()
        self._messages.append(self._to_say.pop())
        answer = self._ask("/v1/chat/completions", "free chat", {"messages": self._messages})
        self._messages.append({"role": "assistant", "content": answer})
