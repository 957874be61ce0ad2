"""Dashboard and alerts ask for what is there: every metric, label and label value in them is in a real /metrics."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gateway.limits import Quota
from router.prompt import TokenizerFiles
from tests.gateway.stub import Running, gateway, response, says, stub, writes
from tests.replicas import CREDENTIAL, running, simulated_engine

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "warmpath.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"

OPERATING = ROOT / "docs" / "operating.md"

FUNCTIONS = {"sum", "count", "max", "rate", "increase", "histogram_quantile"}
WORDS = {"and", "or", "unless", "by", "without"}
OF_THE_SCRAPE = {"instance", "job"}
"""Labels that Prometheus adds, as it adds `up`."""
VARIABLES = {"$model", "$replica"}
OF_PROCESSES = {"warmpath_bus_dropped_messages_total", "warmpath_client_connections", "warmpath_tasks"}
"""Metrics that only `warmpath serve` has, not a gateway within a test."""

Samples = Mapping[str, Mapping[str, Set[str]]]
"""Name of a series → its labels → their values."""


def panels() -> Iterator[dict[str, Any]]:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        if panel["type"] != "row":
            yield panel


def queries() -> dict[str, str]:
    """Where it stands → PromQL."""
    found = {f"{panel['title']} {each['refId']}": each["expr"] for panel in panels() for each in panel["targets"]}
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        found |= {rule["alert"]: rule["expr"] for rule in group["rules"]}
    return found


def faults(query: str, samples: Samples) -> list[str]:
    """What of a query names nothing that there is."""
    found: list[str] = []
    text = query.replace("$__rate_interval", "5m")
    if text.count("(") != text.count(")") or text.count("{") != text.count("}"):
        found.append("brackets do not match")
    grouped = [
        label.strip() for labels in re.findall(r"\b(?:by|without)\s*\(([^)]*)\)", text) for label in labels.split(",")
    ]
    text = re.sub(r"\b(?:by|without)\s*\([^)]*\)", " ", text)
    text = re.sub(r"\[\d+[smh]\]", " ", text)
    known: set[str] = set(OF_THE_SCRAPE)
    for name, matchers, call in re.findall(r"\b([a-zA-Z_:][\w:]*)\s*(\{[^}]*\})?\s*(\()?", text):
        if call:
            if name not in FUNCTIONS | WORDS:
                found.append(f"no function {name}")
        elif name in WORDS or re.search(rf'"[^"]*\b{name}\b[^"]*"', text):
            continue
        elif name not in samples and name != "up":
            found.append(f"no metric {name}")
        else:
            labels = samples.get(name, {})
            known |= set(labels)
            found += [f"{name}: {fault}" for fault in _matcher_faults(matchers, labels)]
    found += [f"no label {label} to group by" for label in grouped if label not in known]
    return found


def _matcher_faults(matchers: str, labels: Mapping[str, Set[str]]) -> Iterator[str]:
    for label, operator, value in re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', matchers):
        if label in OF_THE_SCRAPE:
            continue
        if label not in labels:
            yield f"no label {label}"
        elif value in VARIABLES:
            continue
        elif operator in ("=", "!="):
            if value not in labels[label]:
                yield f"{label} is never {value}"
        elif not any(re.fullmatch(value, each) for each in labels[label]):
            yield f"{label} never matches {value}"


def samples_of(*texts: str) -> Samples:
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for text in texts:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = found[sample.name]
                for label, value in sample.labels.items():
                    labels[label].add(value)
    return found


async def served(tmp_path: Path) -> list[str]:
    """What gateway and worker show when they have answered, refused and failed."""
    log = {"access": str(tmp_path / "access.log")}
    async with running(simulated_engine(), TokenizerFiles(kind="trivial")) as worker, stub(says("hi")) as foreign:
        fleet = [
            {"url": foreign.url},
            {"url": worker.base_url, "kind": "warmpath", "credential": CREDENTIAL, "model": worker.model},
        ]
        async with gateway(tmp_path / "state", replicas=fleet, log=log) as front:
            for stream in (True, False):
                assert (await front.chat(model=worker.model, max_tokens=4, stream=stream)).status_code == 200
            assert (await front.chat()).status_code == 200
            foreign.answer = writes(response(500, b"{}"))
            assert (await front.chat()).status_code == 502
            await _refused_by_a_limit(front, worker.model)
            front.gateway.data.telemetry.limiter_failed("timeout")  # there is no Redis here that could
            front.gateway.data.telemetry.queue_refused(worker.model, "full")
            texts = [(await front.admin.get("/metrics")).text]
            async with worker.client() as direct:
                texts.append((await direct.get("/metrics")).text)
    return texts


async def _refused_by_a_limit(front: Running, model: str) -> None:
    _, key = await front.gateway.keys.create("client", name="small", limits=Quota(requests_per_minute=1))
    for _ in range(2):
        answer = await front.client.post(
            "/v1/chat/completions",
            json={"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
            headers={"authorization": f"Bearer {key}"},
        )
    assert answer.status_code == 429


async def test_every_query_names_what_is_there(tmp_path: Path) -> None:
    samples = samples_of(*await served(tmp_path))

    wrong = {place: found for place, query in queries().items() if (found := faults(query, samples))}

    assert wrong == {}
    assert len(queries()) > 50


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("rate(warmpath_nothing_total[5m])", "no metric warmpath_nothing_total"),
        ('warmpath_requests_total{code="200"}', "warmpath_requests_total: no label code"),
        ('warmpath_requests_total{status="201"}', "warmpath_requests_total: status is never 201"),
        ('warmpath_requests_total{status=~"4.."}', "warmpath_requests_total: status never matches 4.."),
        ("sum by (colour) (warmpath_requests_total)", "no label colour to group by"),
        ("ratio(warmpath_requests_total)", "no function ratio"),
        ("sum(rate(warmpath_requests_total[5m])", "brackets do not match"),
    ],
)
def test_a_query_for_what_is_not_there_is_found(query: str, fault: str) -> None:
    samples = {"warmpath_requests_total": {"status": {"200"}}}

    assert faults(query, samples) == [fault]


def test_the_dashboard_shows_what_people_look_for() -> None:
    shown = {panel["title"] for panel in panels()}

    assert shown >= {
        "Healthy replicas",
        "Requests a second",
        "Time to first token",
        "Time between tokens",
        "Running",
        "Waiting",
        "KV usage",
        "Cache hit rate",
        "Decisions by reason",
        "Cached tokens: predicted and reported",
        "Retries and failed tries",
        "Breaker transitions",
        "Refused by limits",
    }
    ids = [panel["id"] for panel in panels()]
    assert len(ids) == len(set(ids))


def test_panels_do_not_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not taken & cells, panel["title"]
        taken |= cells


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert rule["annotations"].keys() == {"summary", "action"}


def test_prometheus_itself_reads_every_query(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("there is no promtool here")
    settings = ROOT / "deploy" / "prometheus" / "prometheus.yaml"
    rules = [
        {"record": "panel", "expr": query.replace("$__rate_interval", "5m"), "labels": {"place": place}}
        for place, query in queries().items()
    ]
    every = tmp_path / "rules.yaml"
    every.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    for command in (["rules", str(ALERTS)], ["rules", str(every)], ["config", str(settings)]):
        done = subprocess.run([promtool, "check", *command], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


async def test_the_tables_of_metrics_are_whole(tmp_path: Path) -> None:
    names = set(re.findall(r"^# TYPE (?!process_)(\S+)", "\n".join(await served(tmp_path)), re.MULTILINE))

    told = set(re.findall(r"^\| `((?:warmpath_|vllm:)\w+)` \|", OPERATING.read_text(), re.MULTILINE))

    assert names - told == set()
    assert told - names == OF_PROCESSES
