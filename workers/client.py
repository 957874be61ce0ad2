"""The HTTP side's handle on an engine.

`ProcessEngineClient` starts an engine process and talks to it over a socket pair (torch). `InProcessEngineClient` drives an
engine in this event loop, at the pace that its simulated clock gives; many fit into one process. Both keep the same
promises, and the same tests run over both.

    EngineError
    ├── EngineBusy   the queue is full; try again after `retry_after_s`
    └── EngineDead   the engine has not started, or has ended

What must hold: a `Generation` ends exactly once: with an output that has a finish reason, or by leaving it early, which
aborts it. If the engine dies, every open generation gets an ``error`` output at once. The queue of a generation needs no
bound of its own, for a request makes no more outputs than its `max_tokens`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, Self

import msgspec

from workers.engine import Engine
from workers.engine_process import IDLE_REPORT_S, EngineArgs
from workers.protocol import (
    MAX_MESSAGE_BYTES,
    Abort,
    EngineInfo,
    Failed,
    FromEngine,
    Output,
    Ready,
    StepReport,
    Submit,
    ToEngine,
    decode_from_engine,
    encode_message,
)

__all__ = [
    "EngineBusy",
    "EngineClient",
    "EngineDead",
    "EngineError",
    "Generation",
    "InProcessEngineClient",
    "ProcessEngineClient",
    "QueueLimits",
]

_logger = logging.getLogger(__name__)

_SPIN: Final = {"GOMP_SPINCOUNT": "10000"}
"""How long a thread that waits for the engine's other threads turns round before it sleeps. GNU OpenMP's own hundreds of
thousands burn a core that somebody else wants: beside two busy processes on two cores a decode step took 88 ms, and so 42;
alone it takes at most a tenth longer, where sleeping at once takes 1.7 times."""

_LENGTH_BYTES: Final = 4
_EXIT_CODE_S: Final = 0.5

_MOST_LAG_S: Final = 0.1
"""A simulated engine that the loop has kept waiting catches up by at most so much; more would be a burst."""

_LEAST_RETRY_AFTER_S: Final = 1.0
_MOST_RETRY_AFTER_S: Final = 60.0


class EngineError(Exception):
    pass


class EngineBusy(EngineError):
    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDead(EngineError):
    pass


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may wait for its first token. Beyond it, waiting longer than any client does is the best one could offer."""

    max_requests: int = 256
    max_prompt_tokens: int = 1 << 20
    """Of all that wait. A single prompt may be longer, if nobody else waits."""


_DEFAULT_LIMITS: Final = QueueLimits()


class EngineClient(Protocol):
    async def start(self) -> EngineInfo:
        """Once. Raises EngineDead with the reason; then nothing is left running."""
        ...

    def submit(self, submit: Submit) -> Generation:
        """Queue a request, at once. Raises EngineBusy, EngineDead. To be entered without a wait in between."""
        ...

    def listen(self, callback: Callable[[StepReport], None]) -> None:
        """Call it with every report, in the event loop, before the report's outputs are handed out."""
        ...

    @property
    def alive(self) -> bool: ...

    @property
    def last_tick(self) -> float:
        """When the last report came (`time.monotonic`)."""
        ...

    async def stop(self) -> None:
        """End the engine, within seconds. Open generations get an error output. May be called at any time, and again."""
        ...


class Generation:
    """The outputs of one request: ``async with client.submit(…) as generation: async for output in generation: …``."""

    def __init__(self, submit: Submit, release: Callable[[Generation], None]) -> None:
        self.rid: Final = submit.rid
        self.prompt_tokens: Final = len(submit.prompt) // 4
        self._release = release
        self._outputs: asyncio.Queue[Output] = asyncio.Queue()
        self._ended = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ended = True
        self._release(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        """The last output is the one with a finish reason."""
        if self._ended:
            raise StopAsyncIteration
        output = await self._outputs.get()
        self._ended = output.finish_reason is not None
        return output

    def _put(self, output: Output) -> None:
        self._outputs.put_nowait(output)


class _Client(ABC):
    """What both clients share: open generations, the bounds of the queue, listeners, and the end of it all."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._open: dict[int, Generation] = {}
        self._queued: dict[int, int] = {}  # rid → tokens to prefill, of those that have no output yet
        self._queued_tokens = 0
        self._listeners: list[Callable[[StepReport], None]] = []
        self._prefill_tok_s = 0.0
        self._last_tick = time.monotonic()
        self._dead: str | None = "the engine has not started"

    @property
    def alive(self) -> bool:
        return self._dead is None

    @property
    def last_tick(self) -> float:
        return self._last_tick

    def listen(self, callback: Callable[[StepReport], None]) -> None:
        self._listeners.append(callback)

    def submit(self, submit: Submit) -> Generation:
        if self._dead is not None:
            raise EngineDead(self._dead)
        generation = Generation(submit, self._leave)
        # The choices of a prompt share it, and the first one computes it.
        num_tokens = 0 if submit.sampling.choice else generation.prompt_tokens + len(submit.resume) // 4
        self._check_queue(num_tokens)
        self._open[generation.rid] = generation
        self._queued[generation.rid] = num_tokens
        self._queued_tokens += num_tokens
        self._send(submit)
        return generation

    @abstractmethod
    def _send(self, message: ToEngine) -> None: ...

    def _check_queue(self, num_tokens: int) -> None:
        fits = not self._queued or self._queued_tokens + num_tokens <= self._limits.max_prompt_tokens
        if len(self._queued) >= self._limits.max_requests or not fits:
            waiting = f"{len(self._queued)} requests with {self._queued_tokens} prompt tokens are waiting"
            raise EngineBusy(waiting, self._retry_after_s())

    def _retry_after_s(self) -> float:
        """When half of what waits will be done, by the measured rate."""
        if not self._prefill_tok_s:
            return _LEAST_RETRY_AFTER_S
        half_s = self._queued_tokens / self._prefill_tok_s / 2
        return min(max(half_s, _LEAST_RETRY_AFTER_S), _MOST_RETRY_AFTER_S)

    def _leave(self, generation: Generation) -> None:
        if self._open.pop(generation.rid, None) is not None:
            self._unqueue(generation.rid)
            if self._dead is None:
                self._send(Abort(rid=generation.rid))

    def _unqueue(self, rid: int) -> None:
        self._queued_tokens -= self._queued.pop(rid, 0)

    def _take(self, report: StepReport) -> None:
        self._last_tick = time.monotonic()
        self._prefill_tok_s = report.prefill_tok_s
        for callback in self._listeners:
            try:
                callback(report)
            except Exception:
                _logger.exception("a listener to the engine's reports failed")
        for output in report.outputs:
            self._hand_out(output)

    def _hand_out(self, output: Output) -> None:
        self._unqueue(output.rid)
        generation = self._open.get(output.rid)
        if generation is None:
            return  # its abort is on the way
        generation._put(output)
        if output.finish_reason is not None:
            del self._open[output.rid]

    def _die(self, reason: str) -> None:
        """No more reports will come. The first reason counts."""
        if self._dead is None:
            self._dead = reason
        for rid in list(self._open):
            self._hand_out(Output(rid=rid, ids=[], finish_reason="error", message=self._dead))


class ProcessEngineClient(_Client):
    """Owns the engine's process: none is left when `stop` returns, or when `start` raises or is cancelled.

    What it writes is bounded by the limits of the queue, so a child in a long step needs no back-pressure here.
    """

    def __init__(
        self,
        args: EngineArgs,
        *,
        limits: QueueLimits = _DEFAULT_LIMITS,
        start_timeout_s: float = 300.0,
        stop_timeout_s: float = 2.0,
        module: str = "workers.engine_process",
    ) -> None:
        super().__init__(limits)
        self._args = args
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._module = module
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> EngineInfo:
        try:
            async with asyncio.timeout(self._start_timeout_s):
                reader = await self._spawn()
                first = await self._read(reader)
        except TimeoutError as error:
            await self.stop()
            raise EngineDead(f"the engine was not ready after {self._start_timeout_s:g} s") from error
        except (OSError, EOFError) as error:
            reason = await self._how_it_ended()
            await self.stop()
            raise EngineDead(reason) from error
        except BaseException:
            await self.stop()
            raise
        if not isinstance(first, Ready):
            await self.stop()
            raise EngineDead(first.message if isinstance(first, Failed) else "the engine did not say that it is ready")
        self._dead = None
        self._last_tick = time.monotonic()
        self._reading = asyncio.create_task(self._read_reports(reader))
        return first.info

    async def stop(self) -> None:
        self._die("the engine was stopped")
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            await self._end(self._process)
        if self._reading is not None:
            await asyncio.wait([self._reading])

    def _send(self, message: ToEngine) -> None:
        assert self._writer is not None, "submit checks that the engine lives"
        self._writer.write(encode_message(message))

    async def _spawn(self) -> asyncio.StreamReader:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    self._module,
                    "--fd",
                    str(theirs.fileno()),
                    msgspec.json.encode(self._args).decode(),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env={**_SPIN, **os.environ},
                )
            except BaseException:
                ours.close()
                raise
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        return reader

    async def _read(self, reader: asyncio.StreamReader) -> FromEngine:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
        if length > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {length} bytes is longer than {MAX_MESSAGE_BYTES}")
        return decode_from_engine(await reader.readexactly(length))

    async def _read_reports(self, reader: asyncio.StreamReader) -> None:
        try:
            while isinstance(message := await self._read(reader), StepReport):
                self._take(message)
            reason = message.message if isinstance(message, Failed) else "the engine started twice"
        except (OSError, EOFError):
            reason = await self._how_it_ended()
        except Exception:
            _logger.exception("reading from the engine failed")
            reason = "the engine sent something that cannot be read"
        _logger.error("%s", reason)
        self._die(reason)

    async def _how_it_ended(self) -> str:
        if self._process is None:
            return "the engine process could not be started"
        await _wait_for_exit(self._process, _EXIT_CODE_S)
        code = self._process.returncode
        if code is None:
            return "the engine process closed its connection"
        return (
            f"the engine process was killed by signal {-code}" if code < 0 else f"the engine process exited with {code}"
        )

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        try:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await _wait_for_exit(process, self._stop_timeout_s)
        finally:  # also when cancelled: it must not outlive us
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await _wait_for_exit(process, self._stop_timeout_s)


async def _wait_for_exit(process: asyncio.subprocess.Process, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await process.wait()


class InProcessEngineClient(_Client):
    """Drives the engine in this event loop: a step is computed at once and shown when its time has passed.

    Commands that come meanwhile wait for the next step, as they would in the socket of an engine process. A generation's
    outputs after its first one are handed out `tokens_per_chunk` ids at a time: what a simulated token costs is its event.
    """

    def __init__(self, engine: Engine, *, limits: QueueLimits = _DEFAULT_LIMITS, tokens_per_chunk: int = 1) -> None:
        super().__init__(limits)
        self._engine = engine
        self._tokens_per_chunk = tokens_per_chunk
        self._held: dict[int, list[Output]] = {}  # rid → not handed out yet, of those that had their first output
        self._commands: list[ToEngine] = []
        self._commanded = asyncio.Event()
        self._driving: asyncio.Task[None] | None = None

    async def start(self) -> EngineInfo:
        self._dead = None
        self._last_tick = time.monotonic()
        self._driving = asyncio.create_task(self._drive())
        return self._engine.info

    async def stop(self) -> None:
        self._die("the engine was stopped")
        if self._driving is not None:
            self._driving.cancel()
            await asyncio.wait([self._driving])

    def _send(self, message: ToEngine) -> None:
        self._commands.append(message)
        self._commanded.set()

    async def _drive(self) -> None:
        try:
            await self._step_for_ever()
        except Exception as error:
            _logger.exception("the engine failed")
            self._die(f"the engine failed: {type(error).__name__}")

    async def _step_for_ever(self) -> None:
        engine = self._engine
        due = time.monotonic()
        while engine.failed is None:
            if not engine.has_work():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(IDLE_REPORT_S):
                        await self._commanded.wait()
                due = time.monotonic()
            self._obey()
            began = engine.clock()
            report = engine.step()
            due = max(due + engine.clock() - began, time.monotonic() - _MOST_LAG_S)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self._take(report if self._tokens_per_chunk == 1 else self._in_chunks(report))
        self._die(engine.failed)

    def _in_chunks(self, report: StepReport) -> StepReport:
        return msgspec.structs.replace(report, outputs=[each for each in map(self._chunk, report.outputs) if each])

    def _chunk(self, output: Output) -> Output | None:
        """What to hand out now that `output` came."""
        ended = output.finish_reason is not None
        held = self._held.get(output.rid)
        if held is None:
            if not ended:
                self._held[output.rid] = []
            return output
        held.append(output)
        if ended:
            del self._held[output.rid]
        elif len(held) < self._tokens_per_chunk:  # each has one id, but the last one of a failed step
            return None
        else:
            self._held[output.rid] = []
        return msgspec.structs.replace(
            output,
            ids=[token for each in held for token in each.ids],
            logprobs=[logprob for each in held for logprob in each.logprobs],
        )

    def _obey(self) -> None:
        commands, self._commands = self._commands, []
        self._commanded.clear()
        for message in commands:
            if isinstance(message, Submit):
                self._engine.submit(message)
            else:
                self._engine.abort(message.rid)
                self._held.pop(message.rid, None)
