"""Both OpenAPI documents are true of a gateway that runs: whatever they allow or forbid is sent to it (schemathesis).

Nothing is a 5xx but what a document names and what can be so; statuses, media types and shapes are as described; what a
schema forbids is refused; no key, a wrong key or one of another kind opens nothing. WARMPATH_TESTS_SCHEMA_CASES says how many
cases there are in all.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gateway.admin.routes import ENDPOINTS as ADMIN_ENDPOINTS
from gateway.aliases import Aliases
from gateway.api_document import Needs, Operation
from gateway.model_cards import ModelCards
from gateway.openai import ENDPOINTS, REFUSED, Body
from gateway.public import public_routes
from gateway.public_operations import PUBLIC_OPERATIONS, request_schema
from router import Router
from router.prompt import TokenizerFiles
from tests.gateway.stub import MODEL, StubReplica, gateway, says, streams, stub
from tests.replicas import CREDENTIAL, in_a_thread, running, simulated_engine

NUM_CASES = int(os.environ.get("WARMPATH_TESTS_SCHEMA_CASES", "240"))
SEED: Final = 7
CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    not_a_server_error,
]
ENDLESS: Final = "/admin/v1/events"
FOREIGN: Final = ("/v1/embeddings", "/v1/responses")
"""What our own workers do not have."""


@dataclass
class System:
    """A gateway before a simulated worker and a foreign replica, in a thread of its own."""

    urls: Mapping[str, str]
    """By document."""
    keys: Mapping[str, str]
    model: str
    target_key_id: str
    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)

    def headers(self, kind: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[kind]}"}


COMPLETED: Final = (
    b'event: response.completed\ndata: {"type":"response.completed","response":{"id":"resp_1","output":[]}}\n\n'
)


class Obliging:
    """Answers with a stream whoever asks for one."""

    replica: StubReplica

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen = self.replica.seen[-1]
        is_streamed = bool(seen.body) and seen.json.get("stream") is True
        await (streams(COMPLETED) if is_streamed else says("hi"))(reader, writer)


@contextlib.asynccontextmanager
async def start(folder: Path) -> AsyncIterator[System]:
    async with (
        running(simulated_engine(speedup=1000), TokenizerFiles(kind="trivial")) as worker,
        stub(obliging := Obliging()) as foreign,
    ):
        obliging.replica = foreign
        own = {"url": worker.base_url, "kind": "warmpath", "credential": CREDENTIAL, "model": worker.model, "id": "own"}
        fleet = [own, {"url": foreign.url, "id": "foreign", "model": MODEL}]
        async with gateway(folder, replicas=fleet) as front:
            target, _ = await front.gateway.keys.create("client", name="target")
            yield System(
                urls={"admin": str(front.admin.base_url), "public": str(front.client.base_url)},
                keys={
                    "client": front.key,
                    "join": (await front.gateway.keys.create("join", name="fuzz"))[1],
                    "admin": front.admin.headers["authorization"].removeprefix("Bearer "),
                },
                model=worker.model,
                target_key_id=target.id,
            )


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with in_a_thread(lambda: start(tmp_path_factory.mktemp("documents"))) as system:
        yield system
    for document in ("admin", "public"):
        by_status = {status: count for (name, status), count in sorted(system.statuses.items()) if name == document}
        print(f"\n{document}: {sum(by_status.values())} cases, by status {by_status}")


OPERATIONS = [
    *(("admin", endpoint) for endpoint in ADMIN_ENDPOINTS if endpoint.path != ENDLESS),
    *(("public", operation) for operation in PUBLIC_OPERATIONS),
]


def modes_of(operation: Operation) -> Sequence[GenerationMode]:
    """A path's names are texts, of which none is forbidden, and a request with no input at all is but one case."""
    if operation.body is not None or operation.query:
        return (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    return (GenerationMode.POSITIVE,)


CASES_A_MODE: Final = -(
    -NUM_CASES // sum(len(modes_of(each)) for _, each in OPERATIONS if each.body or each.query or "{" in each.path)
)


@pytest.fixture(scope="module")
def documents(system: System) -> Mapping[str, Any]:
    paths = {"admin": "/openapi.json", "public": "/openapi/public.json"}
    texts = {name: httpx.get(system.urls["admin"] + path, trust_env=False).json() for name, path in paths.items()}
    return {name: schemathesis.openapi.from_dict(text) for name, text in texts.items()}


@pytest.mark.filterwarnings("ignore:Do not use the `random` module:hypothesis.errors.HypothesisDeprecationWarning")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("document", "operation"), OPERATIONS, ids=lambda value: getattr(value, "path", None))
def test_a_gateway_keeps_to_its_documents(
    system: System, documents: Mapping[str, Any], document: str, operation: Operation
) -> None:
    found = documents[document][operation.path.replace(":path", "")][operation.method]
    kind = "admin" if document == "admin" else "client"
    session = requests.Session()
    session.trust_env = False

    def send(case: Any, known: bool) -> None:
        if known:
            _aim(case, system)
        answer = case.call(base_url=system.urls[document], session=session, headers=system.headers(kind), timeout=60)
        system.statuses[document, answer.status_code] += 1
        if answer.status_code >= 400 and operation.refusal is None:
            error = answer.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"}, error
            if (answer.status_code, error["code"]) in {(503, "no_replica"), (503, "not_ready")}:
                return  # the fuzz cordons replicas
        case.validate_response(answer, checks=CHECKS)

    for mode in modes_of(operation):

        @seed(SEED)
        @settings(
            max_examples=CASES_A_MODE,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=found.as_strategy(generation_mode=mode), known=...)
        def fuzz(case: Any, known: bool) -> None:
            send(case, known)

        fuzz()

    wrong = [{}, {"authorization": "Bearer x"}]
    if operation.needs is not Needs.NO_KEY:
        wrong += [system.headers(other) for other in ("client", "join", "admin") if other not in operation.needs.value]
        path = operation.path.replace(":path", "").format(
            replica_id="own", key_id=system.target_key_id, worker_id="own", model=system.model, id="resp_1"
        )
        for headers in wrong:
            answer = session.request(
                operation.method, system.urls[document] + path, headers=headers, json={}, timeout=60
            )
            assert answer.status_code in (401, 403) or "too_many_invalid_keys" in answer.text, (headers, answer.text)


def _aim(case: Any, system: System) -> None:
    """At what there is, where the schema says no more than that it has a name."""
    known = {"replica_id": "own", "key_id": system.target_key_id, "worker_id": "own", "model": system.model}
    for name in case.path_parameters or {}:
        if name in known:
            case.path_parameters[name] = known[name]
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = MODEL if case.path in FOREIGN else system.model
        case.body.setdefault("max_tokens", 2)


# --- the public one


def test_every_route_of_the_client_listener_is_in_its_document() -> None:
    routes = public_routes(Router(), ModelCards(), Aliases({}), None, unix_time=float)
    served = {(method, route.path) for route in routes for method in (route.methods or set()) - {"HEAD"}}

    assert {(operation.method, operation.path) for operation in PUBLIC_OPERATIONS} == served


def test_every_field_that_the_gateway_reads_is_in_the_document() -> None:
    schemas = {endpoint: request_schema(endpoint)["properties"] for endpoint in ENDPOINTS}

    for name in Body.__struct_fields__:
        assert any(name in properties for properties in schemas.values()), name
    for endpoint, properties in schemas.items():
        assert {name for name in ("warmpath", *REFUSED) if properties[name] is not False} == set(), endpoint
