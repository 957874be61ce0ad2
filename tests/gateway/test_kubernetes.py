"""deploy/kubernetes fits the programs it runs: settings load, flags exist, and what one object names in another is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.commands.serve import serve
from gateway.settings import Settings
from gateway.settings_loader import load_settings

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
TEXTS = {file.name: file.read_text() for file in sorted(FOLDER.glob("*.yaml"))}
OBJECTS: dict[tuple[str, str], Any] = {
    (each["kind"], each["metadata"]["name"]): each for text in TEXTS.values() for each in yaml.safe_load_all(text)
}
GATEWAY = OBJECTS["StatefulSet", "warmpath-gateway"]["spec"]
WORKER = OBJECTS["Deployment", "warmpath-worker"]["spec"]
SECRETS = dict(re.findall(r"--from-literal=([\w-]+)=(\S+?(?:\([^)]*\))?)(?: |$)", TEXTS["gateway.yaml"], re.MULTILINE))
PORTS = {"gateway": {8000, 8001}, "worker": {8100}}


def container(workload: Any) -> Any:
    (only,) = workload["template"]["spec"]["containers"]
    return only


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    for name, value in SECRETS.items():
        (tmp_path / name).write_text(
            re.sub(r"\$\(openssl rand -hex (\d+)\)", lambda found: "5a" * int(found[1]), value)
        )
    file = tmp_path / "settings.yaml"
    text = OBJECTS["ConfigMap", "warmpath-gateway"]["data"]["settings.yaml"]
    file.write_text(text.replace("/run/secrets/warmpath", str(tmp_path)))
    return load_settings(file)


def test_the_settings_load_with_the_secrets_that_are_made(settings: Settings) -> None:
    assert settings.admin.key is not None
    assert settings.admin.join_token is not None
    assert settings.keys.pepper is not None
    assert settings.keys.fleet_secret is not None
    assert [key.name for key in settings.keys.static] == ["first"]
    assert settings.limits.hosts == GATEWAY["replicas"]
    assert settings.registry.ports[0].first == 8100


def test_the_gateways_flags_exist_and_its_files_are_mounted() -> None:
    arguments = container(GATEWAY)["args"]
    assert arguments[0] == "serve"

    config = serve.make_context("serve", list(arguments[1:])).params["config"]

    mounted = {Path(mount["mountPath"]) for mount in container(GATEWAY)["volumeMounts"]}
    assert config.parent in mounted
    assert config.name in OBJECTS["ConfigMap", "warmpath-gateway"]["data"]
    assert mounted >= {Path("/run/secrets/warmpath"), Path("/state"), Path("/tmp")}


def test_workers_flags_exist_and_name_every_gateway() -> None:
    arguments = [
        each.replace("$(POD_NAME)", "w-1").replace("$(POD_IP)", "10.0.0.1") for each in container(WORKER)["args"]
    ]
    told = subprocess.run(
        [sys.executable, "-m", "workers", *arguments, "--help"], capture_output=True, text=True, timeout=60, check=True
    ).stdout

    flags = [each.partition("=")[0] for each in arguments if each.startswith("--")]
    assert {flag for flag in flags if f"{flag} " not in told} == set()
    assert [each.partition("=")[2] for each in arguments if each.startswith("--gateway=")] == [
        f"http://warmpath-gateway-{number}.{GATEWAY['serviceName']}:8001" for number in range(GATEWAY["replicas"])
    ]
    assert {each["name"] for each in container(WORKER)["env"]} == {"POD_NAME", "POD_IP", "WARMPATH_JOIN_TOKEN"}


@pytest.mark.parametrize("workload", [GATEWAY, WORKER], ids=["gateway", "worker"])
def test_what_one_object_names_in_another_is_there(workload: Any) -> None:
    labels = workload["template"]["metadata"]["labels"]
    main = container(workload)
    spec = workload["template"]["spec"]
    ports = {port["containerPort"] for port in main["ports"]}

    assert workload["selector"]["matchLabels"] == labels
    assert ports == PORTS[main["name"]]
    assert {main[probe]["httpGet"]["port"] for probe in main if probe.endswith("Probe")} <= ports
    assert int(workload["template"]["metadata"]["annotations"]["prometheus.io/port"]) in ports
    assert {mount["name"] for mount in main["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    assert ("PodDisruptionBudget", f"warmpath-{main['name']}") in OBJECTS
    for each in main.get("env", []):
        if "secretKeyRef" in each["valueFrom"]:
            assert each["valueFrom"]["secretKeyRef"]["key"] in SECRETS


def test_services_lead_to_the_gateways_also_before_they_are_ready() -> None:
    for name in ("warmpath", GATEWAY["serviceName"]):
        service = OBJECTS["Service", name]["spec"]
        assert service["selector"] == GATEWAY["template"]["metadata"]["labels"]
        assert {port.get("targetPort", port["port"]) for port in service["ports"]} <= PORTS["gateway"]
    assert OBJECTS["Service", GATEWAY["serviceName"]]["spec"]["publishNotReadyAddresses"]
    assert GATEWAY["podManagementPolicy"] == "Parallel"  # the first is not ready before a worker knows it


def test_pods_outlive_the_answers_that_run(settings: Settings) -> None:
    pause_s = container(GATEWAY)["lifecycle"]["preStop"]["sleep"]["seconds"]

    assert GATEWAY["template"]["spec"]["terminationGracePeriodSeconds"] > pause_s + settings.server.grace_s + 2
    (grace,) = [float(each.partition("=")[2]) for each in container(WORKER)["args"] if each.startswith("--grace=")]
    assert WORKER["template"]["spec"]["terminationGracePeriodSeconds"] > grace
