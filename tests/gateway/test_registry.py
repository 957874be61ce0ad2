from collections.abc import Callable

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.admin.registry import (
    InvalidReplica,
    NotHolder,
    Registrant,
    Registry,
    ReplicaConflict,
    ReplicaMismatch,
    UnknownReplica,
    checked_model,
    checked_replica_id,
)
from router import ReplicaView, Router
from router.wire import ReplicaSpec

WORKER = Registrant("key-w")
OTHER = Registrant("key-o")
OPERATOR = Registrant("key-a", is_admin=True)

SPEC = ReplicaSpec(url="http://127.0.0.1:8101", model="m", epoch="e1", credential="c")


class Watch:
    """Who is watched, as the registry asked for it."""

    def __init__(self) -> None:
        self.watched: dict[str, ReplicaSpec] = {}
        self.starts = 0

    def start(self, replica_id: str, spec: ReplicaSpec) -> None:
        self.watched[replica_id] = spec
        self.starts += 1

    def stop(self, replica_id: str) -> None:
        del self.watched[replica_id]


class Fleet:
    def __init__(self) -> None:
        self.router = Router()
        self.watch = Watch()
        self.registry = Registry(
            self.router, lease_s=15, forget_after_s=60, start_watch=self.watch.start, stop_watch=self.watch.stop
        )

    def view(self, replica_id: str) -> ReplicaView:
        return next(view for view in self.router.replicas() if view.id == replica_id)

    def ids(self) -> list[str]:
        return sorted(view.id for view in self.router.replicas())


def spec(**changes: object) -> ReplicaSpec:
    return msgspec.structs.replace(SPEC, **changes)


def test_a_replica_that_registers_is_known_and_watched() -> None:
    fleet = Fleet()

    lease = fleet.registry.put("w1", SPEC, WORKER, now=100.0)

    assert (lease.lease_s, lease.expires) == (15, 115.0)
    assert fleet.ids() == ["w1"]
    assert fleet.watch.watched == {"w1": SPEC}


def test_registering_again_renews_and_disturbs_nothing() -> None:
    fleet = Fleet()
    fleet.registry.put("w1", SPEC, WORKER, now=0.0)

    lease = fleet.registry.put("w1", SPEC, WORKER, now=10.0)

    assert lease.expires == 25.0
    assert fleet.watch.starts == 1


def test_a_heartbeat_prolongs_the_lease() -> None:
    fleet = Fleet()
    fleet.registry.put("w1", SPEC, WORKER, now=0.0)
    for beat in range(1, 20):
        assert fleet.registry.beat("w1", "e1", WORKER, now=beat * 5.0).expires == beat * 5.0 + 15
        fleet.registry.expire(now=beat * 5.0 + 4.9)

    assert "w1" in fleet.watch.watched


def test_without_heartbeats_it_is_first_not_used_and_later_forgotten() -> None:
    fleet = Fleet()
    fleet.registry.put("w1", SPEC, WORKER, now=0.0)
    fleet.router.set_health("w1", True, 0.0)

    fleet.registry.expire(now=14.9)
    assert fleet.view("w1").healthy

    fleet.registry.expire(now=15.0)
    assert not fleet.view("w1").healthy
    assert fleet.watch.watched == {}

    fleet.registry.expire(now=74.9)
    assert fleet.ids() == ["w1"]

    fleet.registry.expire(now=75.0)
    assert fleet.ids() == []
    assert "w1" not in fleet.registry


def test_a_heartbeat_after_the_lease_means_register_again() -> None:
    fleet = Fleet()
    fleet.registry.put("w1", SPEC, WORKER, now=0.0)
    with pytest.raises(UnknownReplica):
        fleet.registry.beat("w1", "e1", WORKER, now=15.0)

    fleet.registry.expire(now=15.0)
    with pytest.raises(UnknownReplica):
        fleet.registry.beat("w1", "e1", WORKER, now=16.0)
    fleet.registry.put("w1", SPEC, WORKER, now=17.0)

    assert fleet.watch.watched == {"w1": SPEC}
    assert fleet.registry.beat("w1", "e1", WORKER, now=18.0).expires == 33.0


def test_a_heartbeat_of_another_epoch_means_register_again() -> None:
    fleet = Fleet()
    fleet.registry.put("w1", SPEC, WORKER, now=0.0)

    with pytest.raises(UnknownReplica):
        fleet.registry.beat("w1", "e2", WORKER, now=1.0)


def test_a_restart_in_place_is_watched_anew_with_its_new_credential() -> None:
    fleet = Fleet()
    fleet.registry.put("w1", SPEC, WORKER, now=0.0)
    restarted = spec(epoch="e2", credential="c2")

    fleet.registry.put("w1", restarted, WORKER, now=1.0)

    assert fleet.watch.watched == {"w1": restarted}
    assert fleet.watch.starts == 2
    assert fleet.view("w1").spec.epoch == "e2"


def test_a_live_id_does_not_move_within_an_epoch() -> None:
    fleet = Fleet()
    fleet.registry.put("w1", SPEC, WORKER, now=0.0)
    twin = spec(url="http://127.0.0.1:8102")
    with pytest.raises(ReplicaConflict):
        fleet.registry.put("w1", twin, WORKER, now=1.0)
    with pytest.raises(ReplicaConflict):
        fleet.registry.put("w1", twin, OPERATOR, now=1.0)

    fleet.registry.expire(now=15.0)
    fleet.registry.put("w1", twin, WORKER, now=15.0)

    assert fleet.view("w1").spec.url == "http://127.0.0.1:8102"


def test_a_replica_that_moved_with_a_new_epoch_replaces_itself_at_once() -> None:
    fleet = Fleet()
    fleet.registry.put("w1", SPEC, WORKER, now=0.0)
    fleet.router.set_health("w1", True, 0.0)
    fleet.registry.drain("w1", 30.0, now=0.5)
    moved = spec(url="http://127.0.0.1:8102", epoch="e2")
    with pytest.raises(ReplicaConflict):
        fleet.registry.put("w1", moved, OTHER, now=1.0)

    fleet.registry.put("w1", moved, WORKER, now=1.0)

    view = fleet.view("w1")
    assert (view.spec.url, view.healthy, view.draining) == ("http://127.0.0.1:8102", False, False)
    assert fleet.watch.watched["w1"].url == "http://127.0.0.1:8102"
    with pytest.raises(UnknownReplica):
        fleet.registry.beat("w1", "e1", WORKER, now=2.0)  # the process before is nobody any more


def test_an_operators_replica_has_no_lease_and_stays_until_it_is_removed() -> None:
    fleet = Fleet()
    by_hand = ReplicaSpec(url="http://127.0.0.1:8200", model="", kind="openai")
    fleet.registry.add_by_hand("h1", by_hand, OPERATOR, now=0.0)

    fleet.registry.expire(now=1e6)
    with pytest.raises(ReplicaConflict, match="operator"):
        fleet.registry.put("h1", SPEC, WORKER, now=1e6)
    with pytest.raises(ReplicaConflict):
        fleet.registry.add_by_hand("h1", by_hand, OPERATOR, now=1e6)
    with pytest.raises(InvalidReplica):
        fleet.registry.add_by_hand("h2", msgspec.structs.replace(by_hand, model="../m"), OPERATOR, now=1e6)

    assert fleet.registry.lease("h1") is None
    fleet.registry.remove("h1", OPERATOR)
    assert (fleet.ids(), fleet.watch.watched) == ([], {})


STATIC = ReplicaSpec(url="http://10.0.0.1:8000", model="n", kind="openai")


def test_other_settings_change_only_the_replicas_that_are_different() -> None:
    fleet = Fleet()
    moved = msgspec.structs.replace(STATIC, url="http://10.0.0.9:8000")
    fleet.registry.set_static({"s1": STATIC, "s2": STATIC, "s3": STATIC}, now=0.0)
    fleet.registry.put("w1", SPEC, WORKER, now=0.0)
    for replica_id in ("s1", "s2", "w1"):
        fleet.router.set_health(replica_id, True, 0.0)
    wanted = {"s1": STATIC, "s2": moved, "s4": STATIC}
    assert fleet.registry.faults_of(wanted) == []

    fleet.registry.set_static(wanted, now=1.0)

    assert fleet.ids() == ["s1", "s2", "s4", "w1"]
    assert sorted(fleet.watch.watched) == ["s1", "s2", "s4", "w1"]
    assert [fleet.view(name).healthy for name in ("s1", "s2", "w1")] == [True, False, True]
    assert fleet.view("s2").spec.url == "http://10.0.0.9:8000"


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"w1": STATIC}, "taken"),
        ({"s9": msgspec.structs.replace(STATIC, model="m")}, "does not fit"),
        ({"s9": STATIC, "s8": msgspec.structs.replace(STATIC, kind="warmpath")}, "one kind"),
        ({f"s{number}": STATIC for number in range(1024)}, "1024"),
    ],
)
def test_replicas_that_cannot_be_are_told_before_anything_changes(wanted: dict[str, ReplicaSpec], why: str) -> None:
    fleet = Fleet()
    fleet.registry.set_static({"s1": STATIC}, now=0.0)
    fleet.registry.put("w1", SPEC, WORKER, now=0.0)

    faults = fleet.registry.faults_of(wanted)

    assert any(why in fault for fault in faults)
    assert fleet.ids() == ["s1", "w1"]


def test_a_model_may_change_its_kind_when_all_its_static_replicas_do() -> None:
    fleet = Fleet()
    fleet.registry.set_static({"s1": STATIC}, now=0.0)
    own = msgspec.structs.replace(STATIC, kind="warmpath")

    assert fleet.registry.faults_of({"s1": own, "s2": own}) == []
    fleet.registry.set_static({"s1": own, "s2": own}, now=1.0)

    pool = fleet.router.pool("n")
    assert pool is not None
    assert pool.key_space == "tokens"


def test_an_id_belongs_to_the_credential_that_registered_it() -> None:
    fleet = Fleet()
    fleet.registry.put("w1", SPEC, WORKER, now=0.0)

    with pytest.raises(ReplicaConflict):
        fleet.registry.put("w1", SPEC, OTHER, now=1.0)
    with pytest.raises(NotHolder):
        fleet.registry.beat("w1", "e1", OTHER, now=1.0)
    with pytest.raises(NotHolder):
        fleet.registry.remove("w1", OTHER)

    assert fleet.ids() == ["w1"]


def test_an_operator_may_renew_or_remove_what_others_registered() -> None:
    fleet = Fleet()
    fleet.registry.put("w1", SPEC, WORKER, now=0.0)

    fleet.registry.put("w1", SPEC, OPERATOR, now=1.0)
    fleet.registry.beat("w1", "e1", WORKER, now=2.0)  # it still is the worker's
    fleet.registry.remove("w1", OPERATOR)

    assert fleet.ids() == []


def test_a_replica_that_says_goodbye_is_gone_at_once() -> None:
    fleet = Fleet()
    fleet.registry.put("w1", SPEC, WORKER, now=0.0)

    fleet.registry.remove("w1", WORKER)

    assert (fleet.ids(), fleet.watch.watched) == ([], {})
    with pytest.raises(UnknownReplica):
        fleet.registry.remove("w1", WORKER)


def test_one_whose_lease_is_over_can_still_say_goodbye() -> None:
    fleet = Fleet()
    fleet.registry.put("w1", SPEC, WORKER, now=0.0)
    fleet.registry.expire(now=15.0)

    fleet.registry.remove("w1", WORKER)

    assert fleet.ids() == []


def test_a_static_replica_needs_no_heartbeat_and_cannot_be_taken_over() -> None:
    fleet = Fleet()
    fleet.registry.add_static("s1", ReplicaSpec(url="http://10.0.0.1:8000", model="", kind="openai"), now=0.0)

    fleet.registry.expire(now=1e6)

    assert fleet.registry.lease("s1") is None
    assert "s1" in fleet.watch.watched
    for who in (WORKER, OPERATOR):
        with pytest.raises(ReplicaConflict):
            fleet.registry.put("s1", SPEC, who, now=1.0)
    with pytest.raises(NotHolder):
        fleet.registry.beat("s1", "", WORKER, now=1.0)
    with pytest.raises(ReplicaConflict):
        fleet.registry.add_static("s1", SPEC, now=1.0)


def test_a_replica_may_ask_for_a_shorter_lease_but_for_no_longer_one() -> None:
    fleet = Fleet()

    assert fleet.registry.put("w1", spec(lease_s=5.0), WORKER, now=0.0).lease_s == 5
    assert fleet.registry.put("w2", spec(lease_s=1e9), WORKER, now=0.0).lease_s == 15
    assert fleet.registry.put("w3", spec(lease_s=1e-9), WORKER, now=0.0).lease_s == 1
    assert fleet.registry.beat("w1", "e1", WORKER, now=1.0).lease_s == 5


def test_there_is_room_for_a_thousand_replicas_and_no_more() -> None:
    fleet = Fleet()
    for number in range(1024):
        fleet.registry.put(f"w{number}", SPEC, WORKER, now=0.0)

    with pytest.raises(ReplicaConflict, match="1024"):
        fleet.registry.put("one-more", SPEC, WORKER, now=0.0)
    fleet.registry.put("w7", SPEC, WORKER, now=0.0)


def test_another_model_under_the_same_id_is_another_replica() -> None:
    fleet = Fleet()
    fleet.registry.put("w1", SPEC, WORKER, now=0.0)

    fleet.registry.put("w1", spec(model="other", epoch="e2"), WORKER, now=1.0)

    assert fleet.router.models() == ["other"]


def test_a_replica_that_does_not_fit_those_of_its_model_is_refused_and_changes_nothing() -> None:
    fleet = Fleet()
    fleet.registry.put("w1", SPEC, WORKER, now=0.0)
    fleet.registry.put("w2", spec(url="http://127.0.0.1:8102"), WORKER, now=0.0)
    misfit = spec(url="http://127.0.0.1:8103", kind="openai")

    with pytest.raises(ReplicaMismatch):
        fleet.registry.put("w3", misfit, WORKER, now=1.0)
    with pytest.raises(ReplicaMismatch):
        fleet.registry.add_static("s1", misfit, now=1.0)
    with pytest.raises(ReplicaMismatch):
        fleet.registry.put("w1", spec(kind="openai"), WORKER, now=1.0)

    assert fleet.ids() == ["w1", "w2"]
    assert fleet.view("w1").spec.kind == "warmpath"


def test_draining_is_told_to_the_router_and_can_be_undone() -> None:
    fleet = Fleet()
    fleet.registry.put("w1", SPEC, WORKER, now=0.0)

    drain = fleet.registry.drain("w1", 30.0, now=5.0)

    assert drain.deadline == 35.0
    assert fleet.registry.drain_of("w1") == drain
    assert fleet.view("w1").draining

    fleet.registry.stop_drain("w1")

    assert fleet.registry.drain_of("w1") is None
    assert not fleet.view("w1").draining


def test_draining_outlives_a_renewal_and_ends_with_a_restart() -> None:
    fleet = Fleet()
    fleet.registry.put("w1", SPEC, WORKER, now=0.0)
    fleet.registry.drain("w1", 30.0, now=0.0)

    fleet.registry.put("w1", SPEC, WORKER, now=1.0)
    assert fleet.view("w1").draining

    fleet.registry.put("w1", spec(epoch="e2"), WORKER, now=2.0)
    assert not fleet.view("w1").draining
    assert fleet.registry.drain_of("w1") is None


@pytest.mark.parametrize("call", [Registry.lease, Registry.drain_of, Registry.stop_drain])
def test_an_unknown_replica_is_said_to_be_unknown(call: Callable[[Registry, str], object]) -> None:
    with pytest.raises(UnknownReplica):
        call(Fleet().registry, "nobody")


@pytest.mark.parametrize("value", ["", "-a", "a-", "A", "a.b", "../a", "a/b", "a%2fb", "a\n", "a" * 64, "é", "*"])
def test_odd_ids_are_refused(value: str) -> None:
    with pytest.raises(InvalidReplica):
        checked_replica_id(value)
    with pytest.raises(InvalidReplica):
        Fleet().registry.put(value, SPEC, WORKER, now=0.0)


@pytest.mark.parametrize("value", ["a", "worker-0", "0", "a" * 63])
def test_plain_ids_are_fine(value: str) -> None:
    assert checked_replica_id(value) == value


@pytest.mark.parametrize(
    "value", ["", "../m", "a/../b", "a//b", "/a", "a b", "m\n", "m\x00", "a" * 201, "m*", "m%2f", "é"]
)
def test_odd_models_are_refused(value: str) -> None:
    with pytest.raises(InvalidReplica):
        checked_model(value)


@pytest.mark.parametrize("value", ["m", "HuggingFaceTB/SmolLM2-135M-Instruct", "llama3.2:1b", "org/m@main", "a" * 200])
def test_models_as_people_name_them_are_fine(value: str) -> None:
    assert checked_model(value) == value


@pytest.mark.parametrize(
    "changes",
    [
        {"model": ""},
        {"revision": "../x"},
        {"kind": "vllm"},
        {"epoch": "e\r\n"},
        {"epoch": "e" * 65},
        {"credential": "a b"},
        {"credential": "a\r\nx: y"},
        {"credential": "é"},
        {"lease_s": 0.0},
        {"lease_s": -1.0},
        {"lease_s": float("nan")},
        {"lease_s": float("inf")},
    ],
)
def test_values_that_no_replica_has_are_refused(changes: dict[str, object]) -> None:
    fleet = Fleet()

    with pytest.raises(InvalidReplica):
        fleet.registry.put("w1", spec(**changes), WORKER, now=0.0)

    assert fleet.ids() == []


class RegistryMachine(RuleBasedStateMachine):
    """Whatever happens in whatever order, router, registry and watch agree on who is there."""

    ids = st.sampled_from(["w1", "w2", "s1"])
    who = st.sampled_from([WORKER, OTHER, OPERATOR])
    epochs = st.sampled_from(["e1", "e2"])

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet()
        self.fleet.registry.add_static("s1", SPEC, now=0.0)
        self.now = 0.0

    @rule(replica_id=ids, who=who, epoch=epochs, port=st.sampled_from([8101, 8102]), model=st.sampled_from(["m", "n"]))
    def put(self, replica_id: str, who: Registrant, epoch: str, port: int, model: str) -> None:
        wanted = spec(epoch=epoch, url=f"http://127.0.0.1:{port}", model=model)
        try:
            lease = self.fleet.registry.put(replica_id, wanted, who, self.now)
        except ReplicaConflict:
            return
        assert lease.expires > self.now
        assert self.fleet.watch.watched[replica_id] == wanted

    @rule(replica_id=ids, who=who, epoch=epochs)
    def beat(self, replica_id: str, who: Registrant, epoch: str) -> None:
        try:
            self.fleet.registry.beat(replica_id, epoch, who, self.now)
        except (UnknownReplica, NotHolder):
            return
        assert self.fleet.watch.watched[replica_id].epoch == epoch

    @rule(replica_id=ids.filter(lambda value: value != "s1"), who=who)
    def remove(self, replica_id: str, who: Registrant) -> None:
        try:
            self.fleet.registry.remove(replica_id, who)
        except (UnknownReplica, NotHolder):
            return
        assert replica_id not in self.fleet.registry

    @rule(replica_id=ids)
    def drain(self, replica_id: str) -> None:
        if replica_id in self.fleet.registry:
            self.fleet.registry.drain(replica_id, 10.0, self.now)

    @rule(seconds=st.sampled_from([0.5, 5.0, 15.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.fleet.registry.expire(self.now)

    @invariant()
    def all_agree(self) -> None:
        known = self.fleet.ids()
        assert all(replica_id in self.fleet.registry for replica_id in known)
        assert "s1" in known
        leases = {replica_id: self.fleet.registry.lease(replica_id) for replica_id in known}
        running = {replica_id for replica_id, lease in leases.items() if lease is None or lease.expires > self.now}
        assert set(self.fleet.watch.watched) == running
        for replica_id in known:
            assert self.fleet.view(replica_id).draining == (self.fleet.registry.drain_of(replica_id) is not None)


RegistryMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)
TestRegistry = RegistryMachine.TestCase
