import ipaddress
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.admin.addresses import PortRange
from gateway.settings import Settings, TracingSettings
from gateway.settings_loader import SettingsError, load_settings, redacted
from router import RoutingSettings
from router.wire import ReplicaSpec


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith(("WARMPATH_", "OTEL_")):
            monkeypatch.delenv(name)


def write(folder: Path, text: str) -> Path:
    file = folder / "warmpath.yaml"
    file.write_text(text)
    return file


def faults(file: Path | None = None, flags: dict[str, object] | None = None) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load_settings(file, flags)
    assert str(caught.value) == "\n".join(caught.value.faults)
    return caught.value.faults


def test_without_anything_the_defaults_serve_this_machine_only() -> None:
    settings = load_settings()

    assert (settings.server.host, settings.server.port) == ("127.0.0.1", 8000)
    assert (settings.admin.host, settings.admin.port) == ("127.0.0.1", 8001)
    assert all(network.is_loopback for network in settings.registry.networks)
    assert not settings.server.open


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, "server: {port: 1111, host: 127.0.0.2, max_body_bytes: 2048}\nstream: {idle_s: 5}\n")
    monkeypatch.setenv("WARMPATH_SERVER__PORT", "2222")
    monkeypatch.setenv("WARMPATH_SERVER__HOST", "127.0.0.3")

    settings = load_settings(file, {"server": {"port": 3333}})

    assert settings.server.port == 3333
    assert settings.server.host == "127.0.0.3"
    assert settings.server.max_body_bytes == 2048
    assert settings.stream.idle_s == 5
    assert settings.stream.connect_s == Settings().stream.connect_s


def test_the_sample_of_all_settings_has_each_with_its_default() -> None:
    file = Path(__file__).parents[2] / "deploy" / "settings.yaml"

    assert load_settings(file) == Settings()
    assert _names(yaml.safe_load(file.read_text())) == _names(Settings().model_dump(mode="json"))


def _names(settings: dict[str, Any]) -> set[str]:
    """Dotted, of every setting that is no group."""
    inner = {name: _names(value) if isinstance(value, dict) else set() for name, value in settings.items()}
    return {".".join(filter(None, (name, below))) for name, found in inner.items() for below in found or {""}}


def test_lists_come_from_the_environment_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMPATH_REPLICAS", '[{"url": "http://10.0.0.1:8000/v1"}]')
    monkeypatch.setenv("WARMPATH_REGISTRY__NETWORKS", '["10.0.0.0/8"]')
    monkeypatch.setenv("WARMPATH_REGISTRY__PORTS", '["80", "8000-8010"]')

    settings = load_settings()

    assert settings.replicas[0].url == "http://10.0.0.1:8000"
    allowed = settings.registry.allow_list
    assert allowed.permits(ipaddress.ip_address("10.2.3.4"), 8005)
    assert not allowed.permits(ipaddress.ip_address("10.2.3.4"), 8011)
    assert settings.registry.ports == (PortRange(80, 80), PortRange(8000, 8010))


def test_every_kind_of_value_can_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WARMPATH_SERVER__OPEN", "true")
    monkeypatch.setenv("WARMPATH_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("WARMPATH_LIMITS__REQUESTS_PER_MINUTE", "60")
    monkeypatch.setenv("WARMPATH_ADMIN__JOIN_TOKEN", "wpj-fleet-" + "s" * 32)

    settings = load_settings()

    assert settings.server.open
    assert settings.state_dir == tmp_path
    assert settings.limits.requests_per_minute == 60
    assert settings.admin.join_token is not None
    assert settings.admin.join_token.get_secret_value() == "wpj-fleet-" + "s" * 32


def test_every_fault_is_named_in_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, "server: {prot: 1, port: high}\nroutng: {}\nreplicas: [{url: 'ftp://x'}, {}]\n")
    monkeypatch.setenv("WARMPATH_STREAM__IDLE_S", "-1")
    monkeypatch.setenv("WARMPATH_LIMITS__RPM", "1")
    monkeypatch.setenv("WARMPATH_SERVRE__PORT", "1")

    found = faults(file, {"admin": {"port": 70000}})

    assert {fault.partition(":")[0] for fault in found} == {
        "server.prot",
        "server.port",
        "routng",
        "servre",
        "replicas.0.url",
        "replicas.1.url",
        "stream.idle_s",
        "limits.rpm",
        "admin.port",
    }
    assert "server.prot: there is no such setting" in found


def test_variables_of_other_programs_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMPATH_PORT", "tcp://10.0.0.1:8000")  # Kubernetes, for a service called warmpath
    monkeypatch.setenv("WARMPATH_SERVICE_PORT_HTTP", "8000")
    monkeypatch.setenv("WARMPATH_JOIN_TOKEN", "a worker's")

    assert load_settings() == Settings()


def test_a_broken_list_in_the_environment_is_a_named_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMPATH_REPLICAS", "http://s3cret@x")

    (fault,) = faults()

    assert "replicas" in fault
    assert "s3cret" not in fault


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("server: [", "warmpath.yaml"),
        ("- a\n", "must hold settings by name"),
        ("server: {port: 1}\nserver: {port: 2}\n", "'server' appears twice"),
        ("server:\n  port: 1\n  port: 2\n", "'port' appears twice"),
        ("server: !!python/object/apply:os.system [true]\n", "warmpath.yaml"),
        ("8000: x\n", "8000"),
        ("_env_file: x\n", "_env_file: there is no such setting"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, text: str, told: str) -> None:
    assert told in "\n".join(faults(write(tmp_path, text)))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert faults(tmp_path / "none.yaml") == [f"{tmp_path / 'none.yaml'}: No such file or directory"]


def test_an_empty_file_means_defaults(tmp_path: Path) -> None:
    assert load_settings(write(tmp_path, "# nothing yet\n")) == Settings()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_a_gateway_without_keys_may_serve_this_machine(host: str) -> None:
    assert load_settings(flags={"server": {"open": True, "host": host}}).server.open


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com", ""])
def test_a_gateway_without_keys_is_refused_where_others_reach_it(host: str) -> None:
    (fault,) = faults(flags={"server": {"open": True, "host": host}})

    assert fault.startswith("server: open needs")


def test_a_limit_of_zero_is_refused_because_people_mean_two_things_by_it() -> None:
    (fault,) = faults(flags={"limits": {"requests_per_minute": 0}})

    assert fault.startswith("limits.requests_per_minute: ")
    assert load_settings(flags={"limits": {"requests_per_minute": None}}).limits.requests_per_minute is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0, -1])
def test_a_wait_without_an_end_is_refused(value: float) -> None:
    (fault,) = faults(flags={"stream": {"idle_s": value}})

    assert fault.startswith("stream.idle_s: ")


def test_two_listeners_need_two_ports() -> None:
    assert faults(flags={"admin": {"port": 8000}}) == ["admin.port: must differ from server.port"]
    assert load_settings(flags={"admin": {"port": 0}, "server": {"port": 0}}).admin.port == 0


def test_two_replicas_with_one_id_are_refused() -> None:
    (fault,) = faults(flags={"replicas": [{"url": "http://a:8000"}, {"url": "http://b:1", "id": "a-8000"}]})

    assert fault == "replicas: the id a-8000 appears twice"


def test_a_replica_needs_no_more_than_its_url() -> None:
    replica = load_settings(flags={"replicas": [{"url": "http://127.0.0.1:8101"}]}).replicas[0]

    assert replica.replica_id == "127-0-0-1-8101"
    assert replica.spec == ReplicaSpec(url="http://127.0.0.1:8101", model="", kind="openai")


def test_a_replicas_credential_reaches_its_spec_and_nothing_else() -> None:
    settings = load_settings(
        flags={"replicas": [{"id": "a", "url": "https://h", "model": "m", "kind": "warmpath", "credential": "s3cret"}]}
    )

    assert settings.replicas[0].spec.credential == "s3cret"
    assert "s3cret" not in repr(settings)
    assert "s3cret" not in redacted(settings)


def test_printed_settings_load_again_and_their_masks_are_no_secrets(tmp_path: Path) -> None:
    settings = load_settings(
        flags={
            "admin": {"key": "wpa-a-b", "join_token": "wpj-c-d"},
            "replicas": [{"url": "http://127.0.0.1:8101", "credential": "s3cret"}],
            "registry": {"networks": ["10.0.0.0/8", "fd00::/8"], "ports": ["8000-8100", 9000]},
            "limits": {"requests_per_minute": 60},
        }
    )

    printed = redacted(settings)
    again = load_settings(write(tmp_path, printed))

    assert printed.count("'**********'") == 3
    assert again.admin.key is None
    assert again.replicas[0].credential is None
    assert again.registry == settings.registry
    assert again.limits == settings.limits
    assert redacted(load_settings(write(tmp_path, redacted(Settings())))) == redacted(Settings())


def test_secrets_are_not_repeated_in_faults() -> None:
    found = faults(flags={"admin": {"key": ["s3cret"]}, "replicas": [{"url": "http://user:s3cret@host"}]})

    assert len(found) == 2
    assert not any("s3cret" in fault for fault in found)


def test_settings_cannot_be_changed() -> None:
    settings = load_settings()

    with pytest.raises(ValueError, match="frozen"):
        settings.server.port = 1


def test_the_routers_defaults_are_not_said_twice() -> None:
    assert Settings().routing.router_settings == RoutingSettings()
    assert load_settings(flags={"routing": {"policy": "random"}}).routing.router_settings.policy == "random"
    scaled: dict[str, Any] = {"fixed_s": 0.004, "running_s": 0.0004, "w_per_wait_s": 10.0, "saturated_s": 3.6}
    assert load_settings(flags={"routing": scaled}).routing.router_settings == RoutingSettings(**scaled)


def test_special_tokens_in_messages_are_a_matter_of_all_models_or_of_one(tmp_path: Path) -> None:
    file = write(tmp_path, "prompts: {special_tokens_in_text: escape, models: {trusted: parse}}")

    prompts = load_settings(file).prompts

    assert (prompts.escapes("any"), prompts.escapes("trusted")) == (True, False)
    assert not Settings().prompts.escapes("any")
    with pytest.raises(SettingsError, match=r"prompts\.models\.m"):
        load_settings(flags={"prompts": {"models": {"m": "maybe"}}})


# --- secrets in files, keys in the settings


def test_a_secret_may_stand_in_a_file_that_the_file_or_a_variable_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {
        "admin": "wpa-a-b\n",
        "pepper": "ab" * 32 + "\r\n",
        "key": "wp-ID-SECRET",
        "url": "redis://:s@h",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("WARMPATH_ADMIN__KEY_FILE", str(tmp_path / "admin"))
    monkeypatch.setenv("WARMPATH_KEYS__PEPPER_FILE", str(tmp_path / "pepper"))
    monkeypatch.setenv("WARMPATH_REDIS__URL_FILE", str(tmp_path / "url"))
    file = write(
        tmp_path,
        f"keys: {{static: [{{name: ci, key_file: {tmp_path}/key}}]}}\n"
        f"replicas: [{{url: 'http://h:8000', credential_file: {tmp_path}/key}}]\n",
    )

    settings = load_settings(file)

    secrets = (
        settings.admin.key,
        settings.keys.pepper,
        settings.redis.url,
        settings.keys.static[0].key,
        settings.replicas[0].credential,
    )
    assert [secret and secret.get_secret_value() for secret in secrets] == [
        "wpa-a-b",
        "ab" * 32,
        "redis://:s@h",
        "wp-ID-SECRET",
        "wp-ID-SECRET",
    ]


def test_a_secret_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfes3cret")

    found = faults(
        flags={
            "admin": {"key_file": str(tmp_path / "none"), "join_token_file": str(tmp_path / "binary")},
            "keys": {"static": [{"name": "ci", "key": "wp-a-b", "key_file": "x"}], "pepper_file": 5},
        }
    )

    assert "admin.key_file: No such file or directory" in found
    assert "admin.join_token_file: no text" in found
    assert "keys.static.0.key_file: key is given too" in found
    assert any(fault.startswith("keys.pepper_file: ") for fault in found)
    assert not any("s3cret" in fault for fault in found)


def test_a_key_in_the_settings_says_what_it_may(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "keys:\n  static:\n"
        "  - {name: ci, tenant: search, key: wp-team-ssssssssssssssss, models: ['qwen*'], scopes: [chat],\n"
        "     limits: {requests_per_minute: 5}, expires: 2027-01-31T12:00:00Z}\n"
        f"  - {{name: other, id: team2, digest: {'0a' * 32}}}\n",
    )

    first, second = (key.given for key in load_settings(file).keys.static)

    assert first is not None
    assert second is not None
    assert (first.tenant, first.models, first.scopes) == ("search", ("qwen*",), ("chat",))
    assert (first.limits.requests_per_minute, first.expires) == (5, 1801396800.0)
    assert (second.id, second.digest, second.text) == ("team2", "0a" * 32, None)
    assert "ssss" not in repr(first)
    again = load_settings(write(tmp_path, redacted(load_settings(file))))
    assert [key.given for key in again.keys.static] == [None, second]


@pytest.mark.parametrize(
    "key",
    [
        {},
        {"name": "ci"},
        {"name": "c i", "key": "wp-a-b"},
        {"name": "ci", "key": "wp-a-b", "id": "team", "digest": "0a" * 32},
        {"name": "ci", "id": "team"},
        {"name": "ci", "id": "team", "digest": "xx"},
        {"name": "ci", "key": "wp-a-b", "scopes": ["everything"]},
        {"name": "ci", "key": "wp-a-b", "models": [" "]},
        {"name": "ci", "key": "wp-a-b", "expires": "2027-01-31T12:00:00"},
        {"name": "ci", "key": "wp-a-b", "kind": "admin"},
    ],
)
def test_an_odd_key_in_the_settings_is_refused(key: dict[str, Any]) -> None:
    assert all(fault.startswith("keys.static.0") for fault in faults(flags={"keys": {"static": [key]}}))


@pytest.mark.parametrize("pepper", ["", "ab", "zz" * 32, "ab" * 31])
def test_a_pepper_that_is_too_short_is_refused_without_repeating_it(pepper: str) -> None:
    (fault,) = faults(flags={"keys": {"pepper": pepper}})

    assert "openssl rand -hex 32" in fault
    assert not pepper or pepper not in fault


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, TracingSettings()),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, TracingSettings(exporter="otlp")),
        ({"OTEL_SERVICE_NAME": "edge"}, TracingSettings(service_name="edge")),
        ({"OTEL_TRACES_SAMPLER": "always_on"}, TracingSettings(sample_ratio=1, follow_caller=False)),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_off"}, TracingSettings(sample_ratio=0)),
        (
            {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.25"},
            TracingSettings(sample_ratio=0.25),
        ),
        ({"OTEL_TRACES_EXPORTER": "otlp", "WARMPATH_TRACING__EXPORTER": "none"}, TracingSettings()),
    ],
)
def test_the_standard_variables_of_traces_are_read(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: TracingSettings
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert load_settings().tracing == expected


@pytest.mark.parametrize(
    "variables",
    [
        {"OTEL_TRACES_EXPORTER": "zipkin"},
        {"OTEL_TRACES_SAMPLER": "jaeger_remote"},
        {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "many"},
    ],
)
def test_a_standard_variable_that_means_nothing_here_is_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(SettingsError, match=r"(?i)tracing|otel"):
        load_settings()


def test_where_spans_go_is_a_url_without_a_password() -> None:
    for wrong in ("collector:4318", "http://user:secret@host:4318", "ftp://host"):
        with pytest.raises(ValueError, match="write http://host:port/path") as refused:
            TracingSettings(endpoint=wrong)
        assert "secret" not in str(refused.value)
