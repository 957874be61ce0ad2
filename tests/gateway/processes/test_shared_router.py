"""Routers of several processes: one view of load, and nothing left of what is over, whatever became of the messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.processes.messages import (
    Answered,
    Batch,
    Begun,
    Busy,
    Finished,
    Message,
    OpenNumbers,
    decode_batch,
    encode_batch,
    size_of,
)
from gateway.processes.shared_router import SILENCE_S, SharedRouter
from router import BlockName, Decision, Outcome, Query, ReplicaView, Reservation, RoutingSettings, Unroutable
from router.wire import Load, ReplicaSpec

REPLICAS = ("r0", "r1")
NAMES = [BlockName(number) for number in range(1, 9)]


@dataclass(eq=False)
class Process:
    number: int
    said: list[Message] = field(default_factory=list)
    router: SharedRouter = field(init=False)

    def __post_init__(self) -> None:
        self.router = SharedRouter(RoutingSettings(), self.said.append, self.said.append, lambda: None)
        for replica in REPLICAS:
            spec = ReplicaSpec(url=f"http://{replica}", model="m", kind="openai")
            self.router.add(replica, spec, 0.0)
            self.router.set_health(replica, True, 0.0)

    def view(self, replica: str = "r0") -> ReplicaView:
        return next(view for view in self.router.replicas() if view.id == replica)

    def begin(self, request_id: str = "req", now: float = 1.0, replica: str = "r0", tokens: int = 512) -> Reservation:
        decision = Decision(replica, 0, tokens, "of the test", 1.0, "cost", ())
        return self.router.begin(decision, Query("m", NAMES, tokens), request_id, now)

    def take(self) -> list[Message]:
        said, self.said[:] = list(self.said), []
        return said


def processes(count: int = 2) -> list[Process]:
    made = [Process(number) for number in range(1, count + 1)]
    for process in made:
        process.router.set_processes([other.number for other in made], 0.0)
    return made


def deliver(sender: Process, receiver: Process, messages: Sequence[Message], now: float = 1.0) -> None:
    for message in messages:
        receiver.router.hear(sender.number, message, now)


def promises(process: Process) -> list[tuple[int, int]]:
    return [(view.inflight, view.promised_tokens) for view in map(process.view, REPLICAS)]


def test_what_one_process_promises_the_other_counts() -> None:
    one, two = processes()

    reservation = one.begin()
    deliver(one, two, one.take())
    promised = promises(two)
    one.router.answered(reservation, 1.5)
    deliver(one, two, one.take())
    answered = promises(two)
    one.router.finish(reservation, 2.0, Outcome.OK, None)
    deliver(one, two, one.take())

    assert promised == [(1, 512), (0, 0)]
    assert answered == [(1, 0), (0, 0)]
    assert promises(two) == [(0, 0), (0, 0)]
    assert two.said == [], "it repeats nothing"


def test_a_prompt_that_another_process_sent_draws_the_next_one() -> None:
    one, two = processes()
    one.router.finish(one.begin(replica="r1"), 1.0, Outcome.OK, None)
    deliver(one, two, one.take())

    decision = two.router.route(Query("m", NAMES, 512), 1.0, 0.0)

    assert isinstance(decision, Decision)
    assert decision.replica_id == "r1"
    assert decision.matched_tokens > 0


def test_failures_that_several_processes_saw_eject_a_replica_everywhere() -> None:
    made = processes(3)
    for turn in range(5):
        process = made[turn % 3]
        process.router.finish(process.begin(), 1.0, Outcome.FAILED, None)
        said = process.take()
        for other in made:
            if other is not process:
                deliver(process, other, said)

    assert [process.view().breaker for process in made] == [made[0].view().breaker] * 3
    assert made[0].view().breaker.value == "open"


def test_a_replica_that_is_busy_is_so_for_all() -> None:
    one, two = processes()

    for replica in REPLICAS:
        one.router.busy(replica, 9.0)
    deliver(one, two, one.take())

    refusal = two.router.route(Query("m", NAMES, 512), 1.0, 0.0)
    assert refusal == Unroutable("capacity", 8.0)


def test_a_load_frame_that_comes_before_the_message_is_not_forgotten() -> None:
    one, two = processes()
    load = Load(
        seq=0,
        ts=0,
        waiting=0,
        waiting_uncached_tokens=0,
        running=1,
        kv_used_blocks=0,
        prefill_tok_s=1000,
        step_ms=10,
        admitted=["early"],
    )
    idle = two.router.route(Query("m", [], 100), 1.0, 0.0)

    two.router.apply("r0", load, 1.0)
    one.begin("early", tokens=100_000)
    deliver(one, two, one.take())

    busy = two.router.route(Query("m", [], 100), 1.0, 0.0)
    assert isinstance(idle, Decision)
    assert isinstance(busy, Decision)
    waits = {candidate.replica: candidate.wait_s for candidate in busy.candidates}
    assert waits["r0"] < 1, "its tokens are in the frame, and count once"


def test_a_process_that_comes_later_learns_what_is_open() -> None:
    one, late = processes()
    prefilling = one.begin("a")
    decoding = one.begin("b", replica="r1")
    one.router.answered(decoding, 2.0)
    over = one.begin("c")
    one.router.finish(over, 2.0, Outcome.CANCELLED, None)

    deliver(one, late, one.router.what_is_open())
    deliver(one, late, one.router.what_is_open())

    assert promises(late) == [(1, 512), (1, 0)]
    assert prefilling.request_id == "a"


def test_what_a_dead_process_promised_is_gone_and_its_last_words_are_not_heard() -> None:
    one, two, three = processes(3)
    one.begin()
    said = one.take()
    deliver(one, two, said)

    two.router.set_processes([2, 3], 2.0)
    after = promises(two)
    deliver(one, two, said)

    assert after == [(0, 0), (0, 0)]
    assert promises(two) == [(0, 0), (0, 0)]
    assert three.view().inflight == 0


def test_a_process_that_stands_still_holds_nothing_for_ever() -> None:
    one, two = processes()
    one.begin()
    deliver(one, two, one.take(), now=1.0)

    two.router.drop_silent(1.0 + SILENCE_S - 0.1)
    held = two.router.open_elsewhere
    two.router.drop_silent(1.0 + SILENCE_S)

    assert (held, two.router.open_elsewhere) == (1, 0)


def test_many_open_requests_take_several_messages() -> None:
    (one,) = processes(1)
    reservations = [one.begin(str(number)) for number in range(12_000)]
    for reservation in reservations[::2]:
        one.router.finish(reservation, 2.0, Outcome.CANCELLED, None)

    messages = one.router.open_numbers()

    ranges = [(message.low, message.high) for message in messages if isinstance(message, OpenNumbers)]
    numbers = [number for message in messages if isinstance(message, OpenNumbers) for number in message.numbers]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == 12_000
    assert [high for _, high in ranges[:-1]] == [low for low, _ in ranges[1:]], "no number is between two ranges"
    assert numbers == list(range(1, 12_000, 2))
    assert all(size_of(message) < 60_000 for message in messages)


@pytest.mark.parametrize(
    "message",
    [
        Begun(7, "req-1", "r0", 1.5, 512, 64, 0, True, False, NAMES),
        Answered(7, 2.5),
        Finished(7, 3.5, Outcome.OK, None, 512),
        Busy("r0", 9.0),
        OpenNumbers(0, 8, [7]),
    ],
)
def test_what_is_sent_is_what_comes(message: Message) -> None:
    data = encode_batch(Batch(3, [message]))

    assert decode_batch(data) == Batch(3, [message])
    assert len(data) <= 64 + size_of(message)


class Lossy:
    """Three processes whose messages are lost, doubled and reordered as hypothesis wants."""

    def __init__(self) -> None:
        self.processes = processes(3)
        self.open: dict[Process, list[Reservation]] = {process: [] for process in self.processes}
        self.underway: list[tuple[Process, Process, Message]] = []
        self.now = 1.0

    def act(self, process: Process, what: str, which: int) -> None:
        self.now += 0.01
        mine = self.open[process]
        if what == "begin":
            mine.append(
                process.begin(f"{process.number}-{which}", self.now, REPLICAS[which % 2], 16 * (which % 40 + 1))
            )
        elif mine and what == "answer":
            process.router.answered(mine[which % len(mine)], self.now)
        elif mine:
            outcome = list(Outcome)[which % len(Outcome)]
            process.router.finish(mine.pop(which % len(mine)), self.now, outcome, None)
        self.send(process, process.take())

    def send(self, process: Process, messages: Sequence[Message]) -> None:
        self.underway += [
            (process, other, message) for message in messages for other in self.processes if other is not process
        ]

    def deliver(self, which: int, what: str) -> None:
        if self.underway:
            place = which % len(self.underway)
            sender, receiver, message = self.underway[place] if what == "double" else self.underway.pop(place)
            if what != "lose":
                deliver(sender, receiver, [message], self.now)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "begin", "answer", "finish", "deliver", "deliver", "deliver", "double", "lose"]),
        st.integers(0, 2),
        st.integers(0, 1000),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_when_all_is_over_nothing_is_left_whatever_was_lost(steps: list[tuple[str, int, int]]) -> None:
    fleet = Lossy()
    for what, number, which in steps:
        if what in ("deliver", "double", "lose"):
            fleet.deliver(which, what)
        else:
            fleet.act(fleet.processes[number], what, which)
    for process, mine in fleet.open.items():
        while mine:
            process.router.finish(mine.pop(), fleet.now, Outcome.CANCELLED, None)

    for process in fleet.processes:
        for other in fleet.processes:
            if other is not process:
                deliver(process, other, process.router.open_numbers(), fleet.now)

    for process in fleet.processes:
        assert promises(process) == [(0, 0), (0, 0)]
        assert process.router.open_elsewhere == 0


@settings(max_examples=40, deadline=None)
@given(STEPS)
def test_where_nothing_is_lost_all_see_the_same(steps: list[tuple[str, int, int]]) -> None:
    fleet = Lossy()
    for what, number, which in steps:
        if what in ("begin", "answer", "finish"):
            fleet.act(fleet.processes[number], what, which)
        if what == "deliver":
            while fleet.underway:
                fleet.deliver(0, "deliver")

    while fleet.underway:
        fleet.deliver(0, "deliver")

    assert [promises(process) for process in fleet.processes] == [promises(fleet.processes[0])] * 3
    if not any(what == "finish" and which % len(Outcome) for what, _, which in steps):
        # Of two who expect the same blocks the last one heard of counts; where that one fails, they are forgotten.
        expected = [process.view().expected_blocks for process in fleet.processes]
        assert expected == expected[:1] * 3
