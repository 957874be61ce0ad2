"""The engine's side of the socket, in a thread where that shows more, and in a real process for signals and ends."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import msgspec
import pytest

from router.wire import unpack_ids
from tests.workers.fake_engine_process import make_args
from tests.workers.fake_runner import FakeRunner, answer, make_info, make_submit
from workers import engine_process
from workers.engine import Engine
from workers.engine_process import build_torch_engine, serve
from workers.protocol import (
    Abort,
    Failed,
    FromEngine,
    Ready,
    StepReport,
    ToEngine,
    decode_from_engine,
    encode_message,
)
from workers.step import RowResult, ScheduledSeq

DEADLINE_S = 10.0
PROMPT = list(range(10))


class Parent:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(DEADLINE_S)

    def send(self, *messages: ToEngine) -> None:
        self.sock.sendall(b"".join(encode_message(message) for message in messages))

    def read(self) -> FromEngine:
        return decode_from_engine(self._read_exactly(int.from_bytes(self._read_exactly(4), "big")))

    def read_report(self) -> StepReport:
        message = self.read()
        assert isinstance(message, StepReport)
        return message

    def read_ids(self, rid: int) -> list[int]:
        ids: list[int] = []
        while True:
            for output in self.read_report().outputs:
                if output.rid == rid:
                    ids += output.ids
                    if output.finish_reason is not None:
                        return ids

    def _read_exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            data += self.sock.recv(count - len(data))
        return data


@contextmanager
def serving(build: Callable[[], Engine]) -> Iterator[tuple[Parent, Future[int]]]:
    ours, theirs = socket.socketpair()
    with ThreadPoolExecutor(1) as executor, theirs:
        code = executor.submit(serve, theirs, build)
        with ours:
            yield Parent(ours), code


def make_engine() -> Engine:
    return Engine(FakeRunner(make_info()))


def test_commands_in_any_split_are_obeyed() -> None:
    submit = make_submit(1, PROMPT)
    with serving(make_engine) as (parent, _):
        assert parent.read() == Ready(info=make_info())
        for byte in encode_message(submit):
            parent.sock.send(bytes([byte]))

        assert parent.read_ids(1) == answer(unpack_ids(submit.prompt), submit.sampling, 1000)


def test_an_abort_ends_a_request() -> None:
    with serving(make_engine) as (parent, _):
        parent.read()
        parent.send(make_submit(1, PROMPT, max_tokens=200, ignore_eos=True), Abort(rid=1))
        report = parent.read_report()
        while report.admitted == []:
            report = parent.read_report()

        assert (report.running, report.waiting, report.outputs) == (0, 0, [])


class GatedRunner(FakeRunner):
    """Each step waits for the test."""

    def __init__(self) -> None:
        super().__init__(make_info())
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)

    def step(self, batch: Sequence[ScheduledSeq]) -> list[RowResult]:
        self.begun.release()
        assert self.may_end.acquire(timeout=DEADLINE_S)
        return super().step(batch)


def test_an_abort_in_the_middle_of_a_step_frees_its_blocks_with_the_next_report() -> None:
    runner = GatedRunner()
    with serving(lambda: Engine(runner)) as (parent, _):
        parent.read()
        parent.send(make_submit(1, PROMPT, max_tokens=200, ignore_eos=True))
        assert runner.begun.acquire(timeout=DEADLINE_S)
        parent.send(Abort(rid=1))
        runner.may_end.release()
        report = parent.read_report()
        while not report.running:
            report = parent.read_report()

        assert report.kv_used_blocks > 0, "the step under way"
        report = parent.read_report()
        assert (report.running, report.kv_used_blocks) == (0, 0)
        assert len(runner.batches) == 1


def test_an_idle_engine_reports_at_least_twice_a_second() -> None:
    with serving(make_engine) as (parent, _):
        parent.read()
        times = []
        for _ in range(3):
            assert parent.read_report().running == 0
            times.append(time.monotonic())

    assert times[1] - times[0] > 0.2, "it does not spin"
    assert times[2] - times[0] < 2.0


def test_it_ends_when_the_parent_closes() -> None:
    with serving(make_engine) as (parent, code):
        parent.read()
        parent.send(make_submit(1, PROMPT, max_tokens=200, ignore_eos=True))
        parent.read()
        parent.sock.close()

        assert code.result(DEADLINE_S) == 0


def test_a_parent_that_does_not_read_stops_the_steps_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "MAX_UNSENT_BYTES", 2000)
    monkeypatch.setattr(engine_process, "IDLE_REPORT_S", 0.05)
    runner = FakeRunner(make_info())
    submit = make_submit(1, [1], max_tokens=250, ignore_eos=True)
    with serving(lambda: Engine(runner)) as (parent, code):
        parent.read()
        for rid in range(2, 30):  # reports are small, so it takes many before any socket is full
            parent.send(make_submit(rid, [rid % 20], max_tokens=250, ignore_eos=True))
        parent.send(submit)
        steps = -1
        while steps != len(runner.batches):  # no step in the time of some hundred of them
            steps = len(runner.batches)
            cpu_s = time.process_time()
            time.sleep(0.3)
        assert time.process_time() - cpu_s < 0.15, "it does not spin"
        assert steps < 29 * 250 / 8, "there is more to do"

        assert parent.read_ids(1) == answer([1], submit.sampling, 1000)
        parent.sock.close()
        assert code.result(DEADLINE_S) == 0


def test_a_parent_that_goes_without_reading_ends_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "MAX_UNSENT_BYTES", 0)
    with serving(make_engine) as (parent, code):
        parent.send(*(make_submit(rid, [1], max_tokens=250, ignore_eos=True) for rid in range(20)))
        parent.sock.close()

        assert code.result(DEADLINE_S) == 0


def test_a_failure_is_told_in_one_line() -> None:
    def build() -> Engine:
        raise RuntimeError("no\nsuch thing")

    with serving(build) as (parent, code):
        assert parent.read() == Failed(message="RuntimeError: no such thing")
        assert code.result(DEADLINE_S) == 1


def test_the_last_words_reach_a_parent_that_reads_slowly() -> None:
    def build() -> Engine:
        raise ValueError("x" * 1_000_000)

    with serving(build) as (parent, code):
        assert parent.read() == Failed(message="x" * 1_000_000)
        assert code.result(DEADLINE_S) == 1


def test_an_unreadable_command_ends_it() -> None:
    with serving(make_engine) as (parent, code):
        parent.read()
        parent.sock.sendall((1 << 31).to_bytes(4, "big"))
        message = parent.read()
        while isinstance(message, StepReport):
            message = parent.read()

        assert message == Failed(message="a message of 2147483648 bytes is longer than 67108864")
        assert code.result(DEADLINE_S) == 1


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "workers.runner", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)

    with serving(lambda: build_torch_engine(make_args())) as (parent, _):
        assert parent.read() == Failed(message="a model needs torch: install warmpath[engine]")


@contextmanager
def process(model: str = "fake") -> Iterator[tuple[Parent, subprocess.Popen[bytes]]]:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "tests.workers.fake_engine_process", "--fd", str(theirs.fileno())]
    with theirs:
        child = subprocess.Popen([*command, msgspec.json.encode(make_args(model)).decode()], pass_fds=[theirs.fileno()])
    with ours:
        try:
            yield Parent(ours), child
        finally:
            child.kill()
            child.wait()


def test_a_process_ignores_an_interrupt_and_ends_at_a_termination() -> None:
    with process("slow") as (parent, child):
        parent.read()
        parent.send(make_submit(1, PROMPT, max_tokens=200, ignore_eos=True))
        child.send_signal(signal.SIGINT)
        parent.read_report()
        parent.read_report()
        assert child.poll() is None

        child.send_signal(signal.SIGTERM)
        assert child.wait(DEADLINE_S) == 0


def test_a_process_that_cannot_start_exits_with_1() -> None:
    with process("cannot start") as (parent, child):
        assert parent.read() == Failed(message="the model file is broken")
        assert child.wait(DEADLINE_S) == 1


def test_a_process_does_not_outlive_its_parent() -> None:
    with process() as (parent, child):
        parent.read()
        parent.sock.close()

        assert child.wait(DEADLINE_S) == 0
