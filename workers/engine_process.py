"""The engine in a process of its own: ``python -m workers.engine_process --fd N JSON``.

Reads commands from the inherited socket N, steps the engine, and sends one report after each step, or when idle a few
times a second (`workers.protocol`). Its parent is the HTTP process (`workers.client.ProcessEngineClient`).

How it ends, always without leaving anything behind:
- the parent closes its end, or dies: exit code 0, after the step under way at the latest;
- SIGTERM: exit code 0. SIGINT is ignored: a Ctrl-C reaches the whole process group, and the parent decides;
- it cannot start, or two steps in a row fail, or a bug: a `Failed` message with one line, exit code 1.

A parent that does not read: at most `MAX_UNSENT_BYTES` of reports (and one more) are kept, then no step runs until they are
gone, for tokens that nobody takes need not be made. The loop never blocks in a send: it still takes commands, and still
ends when the parent closes.
"""

from __future__ import annotations

import argparse
import logging
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec

from workers.engine import DEFAULT_TOKEN_BUDGET, Engine
from workers.model_errors import ModelError
from workers.protocol import (
    MAX_MESSAGE_BYTES,
    Failed,
    FromEngine,
    Ready,
    Submit,
    ToEngine,
    decode_to_engine,
    encode_message,
)

if TYPE_CHECKING:
    from workers.grammar import GrammarCompiler

__all__ = ["IDLE_REPORT_S", "MAX_UNSENT_BYTES", "EngineArgs", "build_torch_engine", "main", "serve"]

_logger = logging.getLogger(__name__)

MAX_UNSENT_BYTES: Final = 4 << 20
"""Many thousand reports of decode steps; below it the parent may be late without costing a step."""

IDLE_REPORT_S: Final = 0.4
"""An engine with nothing to do reports so often: its silence means that it hangs (`workers.health`)."""

_LAST_WORD_S: Final = 2.0
_RECEIVE_BYTES: Final = 1 << 20
_LENGTH_BYTES: Final = 4


class EngineArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an engine process is started with."""

    model_path: str
    """A folder with safetensors, or a .gguf file (`workers.hub` makes one of a name)."""
    model: str
    """The name it is served under, with the revision a part of the names of its blocks."""
    revision: str = ""
    precision: str
    threads: int
    kv_bytes: int
    max_num_seqs: int
    max_model_len: int | None = None
    """None: what the model allows."""
    block_size: int
    token_budget: int = DEFAULT_TOKEN_BUDGET
    patience: float = 0.0
    takes_priority: bool = False


class _ParentGone(Exception):
    """Nobody is left to compute for."""


class _EngineFailed(Exception):
    """It cannot start, or go on."""


class _Channel:
    """Messages over a socket that is never waited for but in `exchange`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._poll = select.poll()  # unlike select, it takes a descriptor of any number
        self._received = bytearray()
        self._unsent = bytearray()

    @property
    def congested(self) -> bool:
        return len(self._unsent) > MAX_UNSENT_BYTES

    def send(self, message: FromEngine) -> None:
        self._unsent += encode_message(message)
        self._send_some()

    def exchange(self, timeout_s: float) -> list[ToEngine]:
        """Wait until something can be received, or sent if anything is unsent; then do both. Raises `_ParentGone`."""
        events = self._wait_for(select.POLLIN | (select.POLLOUT if self._unsent else 0), timeout_s)
        if events & select.POLLOUT:
            self._send_some()
        if events & ~select.POLLOUT:  # to read, or to learn of the end
            self._receive_some()
        return self._take_messages()

    def flush(self, timeout_s: float) -> None:
        """Send what is unsent, as far as the parent takes it in time."""
        deadline = time.monotonic() + timeout_s
        while self._unsent and (left_s := deadline - time.monotonic()) > 0:
            if self._wait_for(select.POLLOUT, left_s):
                self._send_some()

    def _wait_for(self, events: int, timeout_s: float) -> int:
        self._poll.register(self._sock, events)
        ready = self._poll.poll(1000 * timeout_s)
        return ready[0][1] if ready else 0

    def _send_some(self) -> None:
        try:
            sent = self._sock.send(self._unsent)
        except BlockingIOError:
            return
        except OSError as error:
            raise _ParentGone from error
        del self._unsent[:sent]

    def _receive_some(self) -> None:
        try:
            data = self._sock.recv(_RECEIVE_BYTES)
        except OSError as error:
            raise _ParentGone from error
        if not data:
            raise _ParentGone
        self._received += data

    def _take_messages(self) -> list[ToEngine]:
        messages: list[ToEngine] = []
        start = 0
        while len(self._received) - start >= _LENGTH_BYTES:
            length = int.from_bytes(self._received[start : start + _LENGTH_BYTES], "big")
            if length > MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of {length} bytes is longer than {MAX_MESSAGE_BYTES}")
            end = start + _LENGTH_BYTES + length
            if len(self._received) < end:
                break
            messages.append(decode_to_engine(bytes(self._received[start + _LENGTH_BYTES : end])))
            start = end
        del self._received[:start]
        return messages


def serve(sock: socket.socket, build: Callable[[], Engine]) -> int:
    """Build an engine and run it until the parent goes. Returns the exit code."""
    channel = _Channel(sock)
    try:
        engine = build()
        channel.send(Ready(info=engine.info))
        _run(channel, engine)
    except _ParentGone:
        return 0
    except Exception as error:
        if not _is_clear(error):
            _logger.exception("the engine ends")
        try:
            channel.send(Failed(message=_one_line(error)))
            channel.flush(_LAST_WORD_S)
        except _ParentGone:
            pass  # then there is nobody to tell
        return 1


def _run(channel: _Channel, engine: Engine) -> NoReturn:
    while True:
        for message in channel.exchange(IDLE_REPORT_S if channel.congested else engine.idle_s(IDLE_REPORT_S)):
            if isinstance(message, Submit):
                engine.submit(message)
            else:
                engine.abort(message.rid)
        if channel.congested:
            continue
        channel.send(engine.step())
        if engine.failed is not None:
            raise _EngineFailed(engine.failed)


def _is_clear(error: Exception) -> bool:
    """Whether its message was written for people; else its kind and where it came from are needed as well."""
    return isinstance(error, _EngineFailed | ModelError | OSError | ValueError)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if text and _is_clear(error) else f"{type(error).__name__}: {text}"


def build_torch_engine(args: EngineArgs) -> Engine:
    try:
        from workers.runner import TorchRunner  # seconds, and hundreds of MB: only here
        from workers.tokenizer_files import count_tokens, load_tokenizer_files
    except ModuleNotFoundError as error:
        raise _EngineFailed(f"a model needs {error.name}: install warmpath[engine]") from error
    path = Path(args.model_path)
    tokenizer = load_tokenizer_files(path)
    num_tokens = count_tokens(tokenizer)
    runner = TorchRunner.load(
        path,
        num_tokens=num_tokens,
        precision=args.precision,
        kv_bytes=args.kv_bytes,
        threads=args.threads,
        max_num_seqs=args.max_num_seqs,
        max_model_len=args.max_model_len,
        block_size=args.block_size,
    )
    info = msgspec.structs.replace(
        runner.info,
        model=args.model,
        revision=args.revision,
        patience=args.patience,
        takes_priority=args.takes_priority,
    )
    grammars = _grammars(tokenizer.tokenizer_json, min(num_tokens, info.vocab_size), info.eos_ids)
    engine = Engine(runner, info=info, grammars=grammars, token_budget=args.token_budget)
    engine.warm_up()
    return engine


def _grammars(tokenizer_json: str, num_tokens: int, eos_ids: Sequence[int]) -> GrammarCompiler | None:
    from workers.grammar import GrammarCompiler

    try:
        return GrammarCompiler(tokenizer_json, num_tokens, eos_ids)
    except ValueError as error:
        _logger.warning("answers cannot be held to a grammar: %s", _one_line(error))
        return None


def main(argv: Sequence[str] | None = None, build: Callable[[EngineArgs], Engine] = build_torch_engine) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    parser = argparse.ArgumentParser(
        prog="python -m workers.engine_process", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--fd", type=int, required=True, help="number of the inherited socket")
    parser.add_argument("args", help="EngineArgs as JSON")
    options = parser.parse_args(argv)
    args = msgspec.json.decode(options.args, type=EngineArgs)
    with socket.socket(fileno=options.fd) as sock:
        code = serve(sock, lambda: build(args))
    # The parent ends us as soon as it has our last word. An exception in the interpreter's own last steps would be told.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return code


if __name__ == "__main__":
    sys.exit(main())
