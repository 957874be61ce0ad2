"""Everything that can be set, as one frozen value. `gateway.settings_loader` makes it of a file, variables and flags."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    IPvAnyNetwork,
    PlainSerializer,
    PlainValidator,
    SecretStr,
    field_validator,
    model_validator,
)

from gateway.admin.addresses import AllowList, PortRange, base_url
from gateway.admin.registry import checked_model, checked_replica_id, replica_id_of
from gateway.health import ProbeRules
from gateway.keys import GivenKey, KeyScope, checked_label, checked_pattern
from gateway.limits import Quota
from gateway.server.connection import ListenerLimits
from gateway.tenants import PRIORITIES, Standing
from gateway.upstream.contract import Timeouts
from router import GateSettings, PolicyName, RoutingSettings
from router.wire import ReplicaSpec

__all__ = [
    "AdminSettings",
    "AdmissionSettings",
    "KeySettings",
    "KeysGroup",
    "LeaseSettings",
    "LimitSettings",
    "LogSettings",
    "ModelSettings",
    "ProbeSettings",
    "PromptSettings",
    "QuotaSettings",
    "RedisSettings",
    "RegistrySettings",
    "ReplicaSettings",
    "RoutingGroup",
    "Secret",
    "ServerSettings",
    "Settings",
    "StreamSettings",
    "TelemetrySettings",
    "TenantSettings",
    "TracingSettings",
    "UpstreamSettings",
]

_ROUTING: Final = RoutingSettings()
_LISTENER: Final = ListenerLimits()
_GATE: Final = GateSettings()
_MASK: Final = "**********"
"""What a secret is printed as."""


def _unless_masked(value: object) -> object:
    return None if value == _MASK else value


def _checked_hex(value: SecretStr | None) -> SecretStr | None:
    if value is not None and not re.fullmatch("([0-9a-fA-F]{2}){32,256}", value.get_secret_value()):
        raise ValueError("must be 32 bytes or more in hex, as `openssl rand -hex 32` makes them")
    return value


def _checked_time(value: datetime) -> datetime:
    if value.tzinfo is None:
        raise ValueError("must say its time zone, as in 2027-01-31T12:00:00Z")
    return value


def _parse_ports(value: object) -> PortRange:
    return value if isinstance(value, PortRange) else PortRange.parse(str(value))


def _http_url(value: str) -> str:
    if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", value):
        raise ValueError("write http://host:port/path")
    return value


Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]
SpecialTokens = Literal["parse", "escape"]
Secret = Annotated[SecretStr | None, BeforeValidator(_unless_masked)]
"""None when not given, and when it is the mask: printed settings can be loaded again, without pretending to a secret."""
HexSecret = Annotated[Secret, AfterValidator(_checked_hex)]
Name = Annotated[str, AfterValidator(checked_label)]
Ports = Annotated[PortRange, PlainValidator(_parse_ports), PlainSerializer(str, return_type=str)]
ReplicaUrl = Annotated[str, AfterValidator(base_url)]
ModelName = Annotated[str, AfterValidator(checked_model)]


class _Group(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class ServerSettings(_Group):
    """The listener that clients use."""

    host: str = "127.0.0.1"
    """Reachable from this machine only, until somebody decides otherwise."""
    port: Port = 8000
    processes: Annotated[int, Field(ge=1, le=64)] = 1
    """That share the port. One process uses one core; more than there are cores only cost."""
    max_body_bytes: Annotated[int, Field(ge=1024, le=1 << 30)] = 4 << 20
    """About a million tokens of English; more is a mistake or an attack."""
    grace_s: Seconds = 25.0
    """How long running answers may go on after SIGTERM. Kubernetes kills after 30 s by default, and what is left then must be
    told that it was cut."""
    drain_s: Annotated[float, Field(ge=0, le=3600)] = 0.0
    """Of that, how long new connections are still accepted, for load balancers that learn of the end late."""
    max_connections: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    """None: two fifths of the descriptors that the process may have, since each may need another one to a replica."""
    head_s: Seconds = _LISTENER.head_s
    """How long a request's line and headers may take to arrive."""
    body_s: Seconds = _LISTENER.body_s
    """The same for its body, and a second more for every 16 KiB of it."""
    write_stall_s: Seconds = _LISTENER.write_stall_s
    """A client that takes nothing of what is sent to it is cut after so long."""
    open: bool = False
    """No keys: for benchmarks and first tries, refused wherever others could reach it."""

    @model_validator(mode="after")
    def _open_means_loopback(self) -> ServerSettings:
        if self.open and not _is_loopback(self.host):
            raise ValueError("open needs host 127.0.0.1, ::1 or localhost: it would serve everybody who reaches it")
        return self

    @model_validator(mode="after")
    def _drain_within_grace(self) -> ServerSettings:
        if self.drain_s >= self.grace_s:
            raise ValueError("drain_s is a part of grace_s, and must be less")
        return self

    @property
    def limits(self) -> ListenerLimits:
        return ListenerLimits(
            max_connections=self.max_connections,
            head_s=self.head_s,
            body_s=self.body_s,
            write_stall_s=self.write_stall_s,
        )


class AdminSettings(_Group):
    """The listener for operators and for replicas that register."""

    host: str = "127.0.0.1"
    port: Port = 8001
    key: Secret = None
    """An admin key of the operator's choice (wpa-ID-SECRET), for scripts that must know it before the first start."""
    join_token: Secret = None
    """The same for replicas that register themselves (wpj-ID-SECRET)."""


class ReplicaSettings(_Group):
    """A replica that is always there; it needs no lease."""

    id: Annotated[str, AfterValidator(checked_replica_id)] | None = None
    """By default made from the URL."""
    url: ReplicaUrl
    model: Annotated[str, AfterValidator(checked_model)] | None = None
    """By default the first one that the replica lists."""
    kind: Literal["openai", "warmpath"] = "openai"
    """What is not one of our own workers is spoken to in plain OpenAI."""
    credential: Secret = None
    """Sent to the replica as its bearer token."""
    priority: bool = False
    """Whether it computes prompts in the order of the body's field priority, the least first: vLLM with --scheduling-policy
    priority. Then it is told to take short prompts first, and which tenants and priorities go before others."""

    @model_validator(mode="after")
    def _is_told_once(self) -> ReplicaSettings:
        if self.priority and self.kind == "warmpath":
            raise ValueError("priority is for replicas of kind openai; own workers are told more than that")
        return self

    @property
    def replica_id(self) -> str:
        return self.id if self.id is not None else replica_id_of(self.url)

    @property
    def spec(self) -> ReplicaSpec:
        credential = self.credential.get_secret_value() if self.credential is not None else ""
        return ReplicaSpec(
            url=self.url, model=self.model or "", kind=self.kind, credential=credential, priority=self.priority
        )


class RoutingGroup(_Group):
    """How replicas are chosen. The router's defaults give their reasons in `router.RoutingSettings`."""

    policy: PolicyName = _ROUTING.policy
    """cost: the least predicted time to the first token. The others are there to compare with."""
    prefill_tok_s: Annotated[float, Field(ge=1, le=1e7)] = _ROUTING.prefill_tok_s
    """Prompt tokens a second that a replica is taken to compute until it was measured."""
    learned_tokens: Annotated[int, Field(ge=0, le=1 << 40)] = _ROUTING.learned_tokens
    """KV tokens that a replica without events is taken to hold, until it was learned; 0 routes those by load alone."""
    fixed_s: Annotated[float, Field(ge=0, le=60)] = _ROUTING.fixed_s
    """What a prompt costs a replica even when all of it is cached, until it was learned where it is not told."""
    running_s: Annotated[float, Field(ge=0, le=1)] = _ROUTING.running_s
    """What each answer that a replica is writing adds to the wait of a new prompt there, at least."""
    bytes_per_token: Annotated[float, Field(ge=0.5, le=64)] = _ROUTING.bytes_per_token
    """Bytes of text that a token stands for where the tokenizer is unknown, until it was learned."""
    index_bytes: Annotated[int, Field(ge=1 << 20, le=1 << 40)] = _ROUTING.index_bytes
    """Memory for what replicas hold. Past it goes what was used least recently; 220 bytes a block and replica."""
    w_per_wait_s: Annotated[float, Field(ge=0, le=1000)] = _ROUTING.w_per_wait_s
    """How much more computing again weighs for each second that even the least busy replica would let a prompt wait."""
    patience: Annotated[float, Field(ge=0, le=100)] = _ROUTING.patience
    """For how long a prompt lets shorter ones pass, times what its own prefill takes; 0: first come, first served."""
    saturated_s: Annotated[float, Field(ge=0, le=3600)] = _ROUTING.saturated_s
    """Of sticky_until_saturated: how much sooner another replica must answer."""
    gateways: Annotated[int, Field(ge=1, le=1000)] = _ROUTING.gateways
    """How many gateways send to the same replicas; its own processes are one."""
    gateway: Annotated[int, Field(ge=1, le=1000)] = _ROUTING.gateway
    """Which of them this one is, from 1. Each has a part of the replicas to choose first."""
    away_s: Annotated[float, Field(ge=0, le=60)] = _ROUTING.away_s
    """How much sooner a prompt must begin at a replica that another gateway chooses first."""

    @model_validator(mode="after")
    def _is_one_of_them(self) -> RoutingGroup:
        if self.gateway > self.gateways:
            raise ValueError(f"gateway is {self.gateway}, but there are {self.gateways} gateways")
        return self

    @property
    def router_settings(self) -> RoutingSettings:
        return RoutingSettings(**dict(self))


class StreamSettings(_Group):
    """How long to wait for replicas."""

    connect_s: Seconds = 2.0
    """A lost SYN is sent again after 1 s; a replica that needs more than that twice is not one to wait for."""
    first_byte_s: Seconds = 120.0
    """Queue and prefill. A CPU replica takes tens of seconds for a long prompt; a client's SDK gives up after 600."""
    idle_s: Seconds = 30.0
    """Between two chunks. A step takes milliseconds; half a minute of silence is a hung replica."""
    commit_after_s: Seconds = 15.0
    """A stream that has no first token by then gets its status line, and comments until it has: proxies cut what is silent."""
    ping_s: Seconds = 10.0
    """Between two such comments."""

    @property
    def timeouts(self) -> Timeouts:
        return Timeouts(connect_s=self.connect_s, first_byte_s=self.first_byte_s, idle_s=self.idle_s)


class UpstreamSettings(_Group):
    """How replicas are spoken to."""

    transport: Literal["native", "httpx"] = "native"
    """httpx: a connection a request and some 80 times the CPU; to compare with, should the native client be in doubt."""


class QuotaSettings(_Group):
    """What somebody may use. None is no limit; 0 is refused, since people mean both by it."""

    requests_per_minute: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1, le=1 << 40)] | None = None
    """Prompt and answer together."""
    parallel_requests: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    tokens_per_day: Annotated[int, Field(ge=1, le=1 << 50)] | None = None
    """From midnight to midnight, UTC, as the next one."""
    usd_per_day: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Needs prices (`models`)."""

    @property
    def quota(self) -> Quota:
        return Quota(
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            parallel_requests=self.parallel_requests,
            tokens_per_day=self.tokens_per_day,
            usd_per_day=self.usd_per_day,
        )


class LimitSettings(QuotaSettings):
    """Of each key that has no limit of its own. Tenants and models have theirs under `tenants` and `models`."""

    reserved_output_tokens: Annotated[int, Field(ge=0, le=1 << 31)] = 512
    """What an answer without max_tokens is taken to need until its usage is known: too little lets more through than the limit,
    by what the running answers have beyond it; too much refuses who has room."""
    hosts: Annotated[int, Field(ge=1, le=1024)] = 1
    """Gateways that serve the same keys. Without a Redis between them each lets its share of every limit through; with one, as
    long as it is away."""


class KeySettings(_Group):
    """A client key of the operator's choice. It is in use while it stands here, and never stored."""

    name: Name
    tenant: Name = "default"
    group: Name | None = None
    """Who may hit each other's cached prefixes; by default a tenant is a group."""
    key: Secret = None
    """wp-ID-SECRET; or, where the text must stay elsewhere:"""
    id: Annotated[str, Field(pattern="^[a-z0-9]{4,32}$")] | None = None
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    """Hex HMAC-SHA256 of the key's text under the pepper."""
    scopes: tuple[KeyScope, ...] = ()
    models: tuple[Annotated[str, AfterValidator(checked_pattern)], ...] = ()
    limits: QuotaSettings = QuotaSettings()
    expires: Annotated[datetime, AfterValidator(_checked_time)] | None = None
    debug: bool = False

    @property
    def given(self) -> GivenKey | None:
        """None for the mask of a printed one."""
        if self.key is None and self.digest is None:
            return None
        return GivenKey(
            kind="client",
            name=self.name,
            tenant=self.tenant,
            group=self.group,
            text=self.key.get_secret_value() if self.key is not None else None,
            id=self.id or "",
            digest=self.digest or "",
            scopes=self.scopes,
            models=self.models,
            limits=self.limits.quota,
            expires=self.expires.timestamp() if self.expires is not None else None,
            debug=self.debug,
        )

    @model_validator(mode="before")
    @classmethod
    def _one_way(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            given = {name for name in ("key", "id", "digest") if values.get(name) is not None}
            if given not in ({"key"}, {"id", "digest"}):
                raise ValueError("needs either key (or key_file), or id and digest")
        return values


class KeysGroup(_Group):
    """Who may use the gateway, besides the keys that the admin API makes."""

    pepper: HexSecret = None
    """What digests of keys are made with. By default made once, in the state folder; gateways that share keys need the same."""
    fleet_secret: HexSecret = None
    """The same of cache salts: gateways with different ones do not share what their replicas cached."""
    static: tuple[KeySettings, ...] = ()


class TenantSettings(_Group):
    """A tenant is a name in keys; what is not set here is the default."""

    quota: QuotaSettings = QuotaSettings()
    """Of all its keys together."""
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Its share of a saturated fleet against others of 1."""
    priority: Literal["interactive", "default", "batch"] = "default"
    """Of its requests, and the highest that one may ask for."""

    @property
    def standing(self) -> Standing:
        return Standing(self.weight, PRIORITIES[self.priority])


class ModelSettings(_Group):
    """What a model costs, in USD for a million tokens, and what all may use of it together."""

    quota: QuotaSettings = QuotaSettings()
    input_usd: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    cached_input_usd: Annotated[float, Field(ge=0, le=1e6)] | None = None
    """None: as any other input."""
    output_usd: Annotated[float, Field(ge=0, le=1e6)] = 0.0


class AdmissionSettings(_Group):
    """The queue in which requests wait while every replica is saturated."""

    max_wait_s: Seconds = _GATE.max_wait_s
    """A replica is saturated while the wait predicted for it is longer."""
    ahead_s: Annotated[float, Field(ge=0, le=60)] = _GATE.ahead_s
    """While requests wait, a replica gets its next one when it has less than this to do. Enough that it never runs dry: at
    many replicas nobody passes what is there already, whoever has the better right."""
    max_queued: Annotated[int, Field(ge=0, le=1_000_000)] = _GATE.max_queued
    """Requests that may wait, for each model; past that the tenant with the most of them loses one. 0: nothing waits."""
    deadline_s: Seconds = _GATE.deadline_s
    """How long one may wait before it is refused."""

    @property
    def gate_settings(self) -> GateSettings:
        return GateSettings(**dict(self))


class RedisSettings(_Group):
    """Where several gateways keep the keys and limits that they share. Without it each keeps its own."""

    url: Secret = None
    """redis://:PASSWORD@HOST:6379/0, rediss:// for TLS, or unix:///PATH."""
    deadline_s: Annotated[float, Field(gt=0, le=5, allow_inf_nan=False)] = 0.05
    """How long a request waits for it; then the gateway decides by itself, by its share of the limits."""

    @field_validator("url")
    @classmethod
    def _is_a_redis(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None and not url.get_secret_value().startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("begins with redis://, rediss:// or unix://")
        return url


class LeaseSettings(_Group):
    """How long a replica that registered itself counts as there without a heartbeat."""

    lease_s: Annotated[float, Field(ge=1, le=3600)] = 15.0
    """Three heartbeats of 5 s. A replica may ask for less."""
    forget_after_s: Annotated[float, Field(ge=0, le=3600)] = 60.0
    """After the lease, what a replica holds is remembered so long: one that only lost its network still holds it."""


class RegistrySettings(_Group):
    """Where replicas that register themselves may live. Those under `replicas` are the operator's word and not checked."""

    networks: tuple[IPvAnyNetwork, ...] = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))
    ports: tuple[Ports, ...] = (PortRange(8000, 8999), PortRange(30000, 65535))
    """Where inference servers and kernel-chosen ports are; not where SSH, mail, databases and caches are."""

    @property
    def allow_list(self) -> AllowList:
        return AllowList(self.networks, self.ports)


class ProbeSettings(_Group):
    """How foreign replicas are asked for their health. Own workers tell it themselves, through their event stream."""

    every_s: Annotated[float, Field(ge=0.1, le=3600)] = 5.0
    """Give or take a fifth, so that a fleet is not asked at once. While a replica is in doubt it is asked sooner."""
    timeout_s: Annotated[float, Field(ge=0.1, le=60)] = 5.0
    """For the whole answer. A server that is busy with long prompts may take seconds."""
    rise: Annotated[int, Field(ge=1, le=100)] = 2
    """Good answers in a row before a replica takes requests."""
    fall: Annotated[int, Field(ge=1, le=100)] = 3
    """Bad ones in a row before it takes none. A refused connection counts as all of them: nobody is there."""

    @property
    def rules(self) -> ProbeRules:
        return ProbeRules(**dict(self))


class PromptSettings(_Group):
    """How messages become token ids. Of own workers only: other replicas get the client's bytes and do it their way."""

    special_tokens_in_text: SpecialTokens = "parse"
    """What a special token is in the text of a message. parse: that token, as in transformers and vLLM. escape: text, so
    that nobody who writes a message can end it, or speak as the system."""
    models: dict[Annotated[str, AfterValidator(checked_model)], SpecialTokens] = {}
    """The same for single models, where it is not that."""

    def escapes(self, model: str) -> bool:
        return self.models.get(model, self.special_tokens_in_text) == "escape"


class TelemetrySettings(_Group):
    """What is counted."""

    metrics: bool = True
    """False: /metrics has only what is known without counting. It saves 3 us a request."""


class TracingSettings(_Group):
    """OpenTelemetry traces. ``OTEL_*`` variables mean what they mean elsewhere; a setting of ours wins over them."""

    exporter: Literal["none", "otlp"] = "none"
    endpoint: Annotated[str, AfterValidator(_http_url)] | None = None
    """Where spans are POSTed (OTLP over HTTP), such as http://127.0.0.1:4318/v1/traces. None: OTEL_EXPORTER_OTLP_ENDPOINT's
    word, else that port of this machine."""
    service_name: Annotated[str, Field(min_length=1, max_length=200)] = "warmpath"
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of the requests without a caller's trace that are recorded. One costs 0.15 ms of CPU."""
    follow_caller: bool = True
    """A caller's trace is recorded if the caller says so. False: by `sample_ratio`, for callers who always say so."""


class LogSettings(_Group):
    """What is written about requests, and how."""

    access: Annotated[str, Field(min_length=1, max_length=4096)] = "stdout"
    """One JSON line a request: to stdout, stderr, a file by its path, or off."""
    format: Literal["text", "json"] = "text"
    """Of the gateway's own messages, on stderr."""


class Settings(_Group):
    server: ServerSettings = ServerSettings()
    admin: AdminSettings = AdminSettings()
    state_dir: Path = Path(".warmpath")
    """Keys, and the secrets that are not given. One gateway owns it."""
    replicas: tuple[ReplicaSettings, ...] = ()
    routing: RoutingGroup = RoutingGroup()
    prompts: PromptSettings = PromptSettings()
    stream: StreamSettings = StreamSettings()
    keys: KeysGroup = KeysGroup()
    upstream: UpstreamSettings = UpstreamSettings()
    limits: LimitSettings = LimitSettings()
    tenants: dict[Name, TenantSettings] = {}
    models: dict[Annotated[str, AfterValidator(checked_model)], ModelSettings] = {}
    aliases: dict[ModelName, ModelName] = {}
    """Names that clients may use for a model: {gpt-4o: qwen3-8b}. An alias hides a model of the same name."""
    admission: AdmissionSettings = AdmissionSettings()
    probes: ProbeSettings = ProbeSettings()
    redis: RedisSettings = RedisSettings()
    leases: LeaseSettings = LeaseSettings()
    registry: RegistrySettings = RegistrySettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    tracing: TracingSettings = TracingSettings()
    log: LogSettings = LogSettings()

    @model_validator(mode="after")
    def _distinct(self) -> Settings:
        ids = [replica.replica_id for replica in self.replicas]
        if repeated := {replica_id for replica_id in ids if ids.count(replica_id) > 1}:
            raise ValueError(f"replicas: the id {min(repeated)} appears twice")
        if chained := self.aliases.keys() & set(self.aliases.values()):
            raise ValueError(f"aliases: {min(chained)} is an alias and cannot be the model of another one")
        if self.server.port == self.admin.port != 0:
            raise ValueError("admin.port: must differ from server.port")
        return self


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
