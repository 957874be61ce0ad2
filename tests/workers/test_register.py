import logging
from collections.abc import AsyncIterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from router.wire import ReplicaSpec
from tests.serving import eventually, serving
from workers.register import Pace, Registration, registered

SPEC = ReplicaSpec(url="http://127.0.0.1:1", model="m", epoch="e1", credential="secret")
QUICK = Pace(beat_s=0.02, retry_min_s=0.01, retry_max_s=0.02)


class Gateway:
    """Keeps what it was told; forgets and fails on command."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.specs: list[dict[str, object]] = []
        self.beats: list[dict[str, object]] = []
        self.tokens: set[str] = set()
        self.known = False
        self.failing = False
        self.lease: dict[str, object] = {"lease_expires": 0}
        self.app = Starlette(
            routes=[
                Route("/admin/v1/replicas/{id}", self.put, methods=["PUT"]),
                Route("/admin/v1/replicas/{id}", self.delete, methods=["DELETE"]),
                Route("/admin/v1/replicas/{id}/heartbeat", self.beat, methods=["POST"]),
            ]
        )

    def count(self, method: str) -> int:
        return sum(1 for called, _ in self.calls if called == method)

    def note(self, request: Request) -> None:
        self.calls.append((request.method, request.path_params["id"]))
        self.tokens.add(request.headers["authorization"])

    async def put(self, request: Request) -> Response:
        self.note(request)
        if self.failing:
            return JSONResponse({"error": "down"}, 500)
        self.specs.append(await request.json())
        self.known = True
        return JSONResponse(self.lease)

    async def beat(self, request: Request) -> Response:
        self.note(request)
        self.beats.append(await request.json())
        return JSONResponse({}, 200 if self.known else 404)

    async def delete(self, request: Request) -> Response:
        self.note(request)
        self.known = False
        return JSONResponse({})


@pytest.fixture
async def gateway() -> Gateway:
    return Gateway()


@pytest.fixture
async def url(gateway: Gateway) -> AsyncIterator[str]:
    async with serving(gateway.app) as url:
        yield url


def registration(url: str, pace: Pace = QUICK) -> Registration:
    return Registration(gateway=url, replica_id="r-1", spec=SPEC, join_token="join", pace=pace)


async def test_a_short_lease_is_renewed_before_it_ends(gateway: Gateway, url: str) -> None:
    gateway.lease = {"lease_s": 0.06}
    async with registered([registration(url, Pace(beat_s=60))]):
        await eventually(lambda: bool(gateway.beats))


async def test_a_gateway_that_restarted_is_told_without_waiting_for_the_next_beat(gateway: Gateway, url: str) -> None:
    ours = registration(url, Pace(beat_s=60))
    async with registered([ours]):
        await eventually(lambda: gateway.known)
        gateway.known = False
        ours.beat_soon()

        await eventually(lambda: gateway.known)


@pytest.mark.parametrize("lease", [{"lease_s": 0}, {"lease_s": -1}, {"lease_s": "soon"}, {}])
async def test_a_lease_that_makes_no_sense_changes_nothing(
    gateway: Gateway, url: str, lease: dict[str, object]
) -> None:
    gateway.lease = lease
    async with registered([registration(url)]):
        await eventually(lambda: len(gateway.beats) >= 2)


async def test_a_replica_registers_beats_and_leaves(gateway: Gateway, url: str) -> None:
    async with registered([registration(url)]):
        await eventually(lambda: len(gateway.beats) >= 2)

    assert gateway.calls[0] == ("PUT", "r-1")
    assert gateway.calls[-1] == ("DELETE", "r-1")
    assert gateway.specs == [{**gateway.specs[0], "url": SPEC.url, "model": "m", "epoch": "e1", "credential": "secret"}]
    assert gateway.beats[0] == {"epoch": "e1"}
    assert gateway.tokens == {"Bearer join"}


async def test_a_gateway_that_forgot_us_is_told_again(gateway: Gateway, url: str) -> None:
    async with registered([registration(url)]):
        await eventually(lambda: gateway.known)
        gateway.known = False
        await eventually(lambda: gateway.count("PUT") >= 2)
        await eventually(lambda: gateway.known)


async def test_registering_is_tried_until_it_works(gateway: Gateway, url: str) -> None:
    gateway.failing = True

    async with registered([registration(url)]):
        await eventually(lambda: gateway.count("PUT") >= 3)
        gateway.failing = False
        await eventually(lambda: bool(gateway.beats))


async def test_a_gateway_may_come_up_after_the_replica(gateway: Gateway) -> None:
    async with serving(gateway.app) as url:
        port = int(url.rpartition(":")[2])

    async with registered([registration(url)]), serving(gateway.app, port=port):
        await eventually(lambda: gateway.known)


async def test_a_dead_gateway_holds_up_no_other(gateway: Gateway, url: str) -> None:
    async with serving(gateway.app) as dead:
        pass

    async with registered([registration(dead), registration(url)]):
        await eventually(lambda: bool(gateway.beats))


@pytest.mark.parametrize(
    ("gateway_url", "token"), [("http://127.0.0.1:port", "join"), ("http://[::1", "join"), (None, "jo\u00efn")]
)
async def test_a_gateway_that_cannot_even_be_asked_holds_up_no_other(
    gateway: Gateway, url: str, gateway_url: str | None, token: str
) -> None:
    hopeless = Registration(gateway=gateway_url or url, replica_id="r-0", spec=SPEC, join_token=token, pace=QUICK)

    async with registered([hopeless, registration(url)]):
        await eventually(lambda: bool(gateway.beats))

    assert ("DELETE", "r-1") in gateway.calls


async def test_the_log_tells_changes_only(gateway: Gateway, url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="workers.register")
    gateway.failing = True

    async with registered([registration(url)]):
        await eventually(lambda: gateway.count("PUT") >= 5)
        gateway.failing = False
        await eventually(lambda: len(gateway.beats) >= 5)

    levels = [record.levelname for record in caplog.records]
    assert levels == ["WARNING", "INFO"]
    assert "500" in caplog.records[0].getMessage()
    assert "registered" in caplog.records[1].getMessage()
    assert "join" not in caplog.text
    assert "secret" not in caplog.text
