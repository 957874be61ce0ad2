"""A data process's replicas, as its supervisor lists them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from gateway.admin.registry import Registrant, Registry
from gateway.processes.members import Member, Membership, members_of
from gateway.watch import Watcher
from router import Router
from router.wire import ReplicaSpec

SPEC = ReplicaSpec(url="http://r", model="m", epoch="e", credential="secret")


@dataclass
class Watching:
    """Which replicas are watched."""

    watched: dict[str, ReplicaSpec] = field(default_factory=dict)
    starts: int = 0

    def start(self, replica_id: str, spec: ReplicaSpec) -> None:
        self.watched[replica_id] = spec
        self.starts += 1

    def stop(self, replica_id: str) -> None:
        self.watched.pop(replica_id, None)


def member(replica_id: str = "r1", **changes: Any) -> Member:
    return msgspec.structs.replace(Member(replica_id, SPEC, 1.0, False, False, True), **changes)


def membership() -> tuple[Membership, Router, Watching]:
    router, watching = Router(), Watching()
    return Membership(router, cast(Watcher, watching), lambda: 0.0), router, watching


def of(router: Router) -> list[tuple[str, float, bool, bool]]:
    return [(view.id, view.weight, view.cordoned, view.draining) for view in router.replicas()]


def test_replicas_come_change_and_go() -> None:
    members, router, watching = membership()

    members.take_over([member("r1"), member("r2")])
    members.take_over([member("r1"), member("r2", weight=2.0, cordoned=True, draining=True)])
    both, starts = of(router), watching.starts
    members.take_over([member("r2")])

    assert both == [("r1", 1.0, False, False), ("r2", 2.0, True, True)]
    assert starts == 2, "what only operators changed is not watched anew"
    assert of(router) == [("r2", 1.0, False, False)]
    assert watching.watched == {"r2": SPEC}
    assert router.spec("r2").credential == "secret"


def test_a_replica_whose_lease_ended_is_known_but_not_used() -> None:
    members, router, watching = membership()
    members.take_over([member()])
    router.set_health("r1", True, 0.0)

    members.take_over([member(watched=False)])
    healthy = [view.healthy for view in router.replicas()]
    members.take_over([member()])

    assert healthy == [False]
    assert watching.watched == {"r1": SPEC}


def test_one_that_restarted_is_watched_anew() -> None:
    members, router, watching = membership()
    restarted = msgspec.structs.replace(SPEC, epoch="e2")

    members.take_over([member()])
    members.take_over([member(spec=restarted)])

    assert watching.watched == {"r1": restarted}
    assert watching.starts == 2
    assert router.spec("r1").epoch == "e2"


def test_a_model_that_goes_to_another_kind_of_replica() -> None:
    members, router, _ = membership()
    foreign = ReplicaSpec(url="http://f", model="m", kind="openai")

    members.take_over([member("own")])
    members.take_over([member("foreign", spec=foreign)])

    assert [view.id for view in router.replicas()] == ["foreign"]


def test_the_list_is_what_the_registry_and_operators_have_made() -> None:
    router, watching = Router(), Watching()
    registry = Registry(
        router,
        lease_s=15,
        forget_after_s=60,
        start_watch=cast(Callable[[str, ReplicaSpec], None], watching.start),
        stop_watch=watching.stop,
    )
    registry.add_static("static", ReplicaSpec(url="http://s", model="m"), 0.0)
    registry.put("leased", SPEC, Registrant("key"), 0.0)
    registry.drain("static", 10.0, 0.0)
    router.patch("leased", weight=3.0)
    registry.expire(20.0)

    found = {each.id: each for each in members_of(registry, router)}

    assert (found["static"].draining, found["static"].watched) == (True, True)
    assert (found["leased"].weight, found["leased"].watched) == (3.0, False)
    assert found["leased"].spec.credential == "secret"


def test_a_model_may_change_from_one_kind_of_replicas_to_another() -> None:
    members, router, watching = membership()
    foreign = msgspec.structs.replace(SPEC, kind="openai")

    members.take_over([member("r1", spec=foreign), member("r2", spec=foreign)])
    members.take_over([member("r1"), member("r2")])

    assert {router.spec(replica_id).kind for replica_id in ("r1", "r2")} == {"warmpath"}
    assert watching.watched == {"r1": SPEC, "r2": SPEC}


def test_a_model_that_was_learned_loses_nothing() -> None:
    members, router, _ = membership()
    nameless = msgspec.structs.replace(SPEC, kind="openai", model="")
    named = msgspec.structs.replace(nameless, model="m")

    members.take_over([member(spec=nameless)])
    router.add("r1", named, 0.0)  # as its watcher has found out
    router.set_health("r1", True, 0.0)
    members.take_over([member(spec=named)])

    assert [view.healthy for view in router.replicas()] == [True]
