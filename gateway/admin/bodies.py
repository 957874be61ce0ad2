"""What the admin API takes and gives, as types: JSON on the wire, schemas in its OpenAPI document.

Made from the router's, the registry's and the key store's own values, so that those can change without changing the API.
Times are Unix seconds here and monotonic seconds there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from gateway.admin.registry import Drain, Lease
from gateway.job import Record
from gateway.keys import KeyKind, KeyRecord, KeyScope, Label, ModelPattern
from gateway.limits import Quota
from router import Candidate, Decision, Pool, ReplicaView

__all__ = [
    "CandidateBody",
    "ChangeEvent",
    "DecisionBody",
    "DecisionList",
    "DrainBody",
    "DrainRequest",
    "ExplanationBody",
    "HeartbeatRequest",
    "KeyBody",
    "KeyList",
    "KeyRequest",
    "LeaseBody",
    "LoadBody",
    "ModelBody",
    "ModelList",
    "NewKeyBody",
    "ReloadBody",
    "ReplicaBody",
    "ReplicaList",
    "ReplicaPatch",
    "ReplicaRequest",
    "RequestRates",
    "State",
    "StateEvent",
    "decision_body",
    "drain_body",
    "explanation_body",
    "key_body",
    "lease_body",
    "model_body",
    "new_key_body",
    "replica_body",
]

Trusted = Literal["exact", "learning", "blind"]


class State(msgspec.Struct, frozen=True):
    status: str


# --- replicas


class LeaseBody(msgspec.Struct, frozen=True):
    lease_s: float
    lease_expires: float


class ReplicaRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A server that speaks OpenAI's API, and is there until somebody removes it or the gateway ends."""

    url: str
    id: str | None = None
    """By default made from the URL."""
    model: str = ""
    """By default the first one that it lists."""
    credential: str = ""
    """Sent to it as its bearer token."""
    priority: bool = False
    """It computes prompts in the order of the body's field priority, as vLLM with --scheduling-policy priority."""


class HeartbeatRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    epoch: str


class ReplicaPatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is left out stays as it is."""

    weight: Annotated[float, msgspec.Meta(gt=0, le=100)] | None = None
    """Its share of the work against others of 1."""
    cordoned: bool | None = None
    """Nothing new is sent there, until this is false again."""


class DrainRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=86400)] = 300.0
    """By when it shall be empty. Nothing is cut off then; it shows as overdue."""


class DrainBody(msgspec.Struct, frozen=True):
    inflight: int
    """Requests of this gateway that still run there."""
    done: bool
    overdue: bool
    deadline: float


class LoadBody(msgspec.Struct, frozen=True, kw_only=True):
    """As the replica says itself, at most a second ago while its event stream is open."""

    waiting: int
    waiting_uncached_tokens: int
    running: int
    kv_used_blocks: int
    prefill_tok_s: float
    step_ms: float
    prompt_tokens_total: int
    cached_tokens_total: int
    generated_tokens_total: int


class ReplicaBody(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    url: str
    model: str
    revision: str
    kind: str
    priority: bool
    """Of kind openai: whether it is told in which order to compute, by the body's field priority."""
    epoch: str
    lease_expires: float | None
    """None for a replica from the settings. In the past: not routed to, what it holds is remembered for a while."""
    healthy: bool
    cordoned: bool
    draining: bool
    drain: DrainBody | None
    weight: float
    breaker: str
    mismatch: str
    """Why it does not fit its pool; '' when it does."""
    trust: Trusted
    """How far the router's picture of its cache can be believed."""
    inflight: int
    """Requests of this gateway there."""
    promised_tokens: int
    """Prompt tokens sent there that gave no first byte yet."""
    prefill_tok_s: float | None
    """As it says, else as learned from its times to first byte."""
    fixed_s: float | None
    """Learned cost of a prompt even when all of it is cached."""
    bytes_per_token: float | None
    """Learned size of a token in its pool; None where tokens are known."""
    capacity_blocks: int | None
    """As it says."""
    capacity_tokens: int
    """What its cache is taken to hold: as it says, else as learned, else the setting."""
    capacity_learned: bool
    indexed_blocks: int
    """By its events."""
    expected_blocks: int
    """More of them, by what was sent there."""
    indexed: bool
    """Whether its events are followed; false for one whose cache is too large for the index."""
    cached_tokens_precision: float | None
    """Share of the predicted cached tokens that it reported, and of the reported ones that were predicted."""
    cached_tokens_recall: float | None
    load: LoadBody | None


class ReplicaList(msgspec.Struct, frozen=True):
    replicas: list[ReplicaBody]


def lease_body(lease: Lease, unix_offset: float) -> LeaseBody:
    return LeaseBody(lease.lease_s, lease.expires + unix_offset)


def drain_body(drain: Drain, replica: ReplicaView, now: float, unix_offset: float) -> DrainBody:
    done = replica.inflight == 0
    return DrainBody(replica.inflight, done, not done and drain.deadline <= now, round(drain.deadline + unix_offset, 3))


def replica_body(
    view: ReplicaView, lease: Lease | None, drain: Drain | None, now: float, unix_offset: float
) -> ReplicaBody:
    return ReplicaBody(
        id=view.id,
        url=view.spec.url,
        model=view.spec.model,
        revision=view.spec.revision,
        kind=view.spec.kind,
        priority=view.spec.priority,
        epoch=view.spec.epoch,
        # Both clocks are read anew each time, some microseconds apart; what did not change shall look the same.
        lease_expires=round(lease.expires + unix_offset, 3) if lease is not None else None,
        healthy=view.healthy,
        cordoned=view.cordoned,
        draining=view.draining,
        drain=drain_body(drain, view, now, unix_offset) if drain is not None else None,
        weight=view.weight,
        breaker=view.breaker.value,
        mismatch=view.mismatch,
        trust=view.trust.value,
        inflight=view.inflight,
        promised_tokens=view.promised_tokens,
        prefill_tok_s=view.prefill_tok_s,
        fixed_s=view.fixed_s,
        bytes_per_token=view.bytes_per_token,
        capacity_blocks=view.hello.capacity_blocks if view.hello is not None else None,
        capacity_tokens=view.capacity_tokens,
        capacity_learned=view.capacity_learned,
        indexed_blocks=view.confirmed_blocks,
        expected_blocks=view.expected_blocks,
        indexed=view.indexed,
        cached_tokens_precision=view.accuracy.precision,
        cached_tokens_recall=view.accuracy.recall,
        load=msgspec.convert(view.load, LoadBody, from_attributes=True) if view.load is not None else None,
    )


# --- the live state


class RequestRates(msgspec.Struct, frozen=True):
    in_flight: int
    """Requests of clients that are being answered."""
    queued: int
    """Of those, how many wait for a replica that is not saturated."""
    per_s: float
    """Requests that ended, a second, over the last nine seconds."""
    failed_per_s: float
    """Of those, the ones with a status of 500 and more."""


class StateEvent(msgspec.Struct, frozen=True, tag="state", tag_field="type"):
    """Everything; the first event of a stream."""

    time: float
    replicas: list[ReplicaBody]
    requests: RequestRates


class ChangeEvent(msgspec.Struct, frozen=True, tag="change", tag_field="type"):
    """What differs from the event before."""

    time: float
    replicas: list[ReplicaBody]
    """Those that came or changed, whole."""
    left: list[str]
    """Ids of those that are gone."""
    requests: RequestRates


# --- models


class ModelBody(msgspec.Struct, frozen=True, kw_only=True):
    """A model and the pool of replicas that serve it."""

    model: str
    revision: str
    aliases: list[str]
    key_space: Literal["tokens", "text"]
    """By what prompts are compared: blocks of tokens, or chunks of text where the tokenizer is unknown."""
    block_size: int
    """Tokens that are matched as one; an estimate in a text pool."""
    tokenizer_digest: str
    max_model_len: int | None
    """The least that its replicas told."""
    replicas: int
    healthy: int
    """Of them, those that are well and fit."""
    inflight: int
    promised_tokens: int
    waiting: int | None
    """Requests that its replicas have not begun, as far as they tell."""
    hit_rate: float | None
    """Share of the prompt tokens that replicas found cached, as far as they tell, since each began."""


class ModelList(msgspec.Struct, frozen=True):
    models: list[ModelBody]


def model_body(
    pool: Pool, views: Sequence[ReplicaView], aliases: Sequence[str], max_model_len: int | None
) -> ModelBody:
    """`views`: of the pool's replicas."""
    loads = [view.load for view in views if view.load is not None]
    prompt_tokens = sum(load.prompt_tokens_total for load in loads)
    return ModelBody(
        model=pool.model,
        revision=pool.revision,
        aliases=list(aliases),
        key_space=pool.key_space,
        block_size=pool.block_size,
        tokenizer_digest=pool.tokenizer_digest,
        max_model_len=max_model_len,
        replicas=len(views),
        healthy=sum(view.healthy and not view.mismatch for view in views),
        inflight=sum(view.inflight for view in views),
        promised_tokens=sum(view.promised_tokens for view in views),
        waiting=sum(load.waiting for load in loads) if loads else None,
        hit_rate=sum(load.cached_tokens_total for load in loads) / prompt_tokens if prompt_tokens else None,
    )


# --- settings


class ReloadBody(msgspec.Struct, frozen=True):
    """Dotted names of settings, as in the file."""

    changed: Sequence[str]
    """In force now."""
    needs_restart: Sequence[str]
    """Changed in the file, and not in force until the gateway is started again."""


# --- keys

_Lifetime = Annotated[float, msgspec.Meta(gt=0, le=10 * 366 * 86400)]
_Patterns = Annotated[tuple[ModelPattern, ...], msgspec.Meta(max_length=64)]
_Scopes = Annotated[tuple[KeyScope, ...], msgspec.Meta(max_length=16)]


class KeyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: Label
    kind: KeyKind = "client"
    tenant: Label = "default"
    group: Label | None = None
    """Keys of one group may hit each other's cached prefixes; by default a tenant is a group."""
    scopes: _Scopes = ()
    """Endpoints it may use; empty is all."""
    models: _Patterns = ()
    """Names and globs of models it may use; empty is all."""
    limits: Quota = Quota()
    """What is not named here is the gateway's default."""
    debug: bool = False
    expires_in_s: _Lifetime | None = None


class KeyPatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is not named stays as it is."""

    name: Label | msgspec.UnsetType = msgspec.UNSET
    scopes: _Scopes | msgspec.UnsetType = msgspec.UNSET
    models: _Patterns | msgspec.UnsetType = msgspec.UNSET
    limits: dict[str, float | int | None] | msgspec.UnsetType = msgspec.UNSET
    """Those named here change; null takes one away."""
    debug: bool | msgspec.UnsetType = msgspec.UNSET
    expires_in_s: _Lifetime | msgspec.UnsetType | None = msgspec.UNSET
    """From now; null is never."""


class RotateRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    overlap_s: Annotated[float, msgspec.Meta(ge=0, le=90 * 86400)] = 86400.0
    """How long the old key still opens, so that everyone who has it can be given the new one."""


class KeyBody(msgspec.Struct, frozen=True, kw_only=True):
    """A key without what could open anything."""

    id: str
    kind: KeyKind
    name: str
    tenant: str
    group: str
    scopes: tuple[KeyScope, ...]
    models: tuple[str, ...]
    limits: Quota
    created: float
    expires: float | None
    debug: bool
    revoked: bool
    source: Literal["api", "settings"]
    """A key from the settings is changed there."""


class NewKeyBody(KeyBody, frozen=True, kw_only=True):
    key: str
    """The key itself. It is not stored and cannot be asked for again."""


class KeyList(msgspec.Struct, frozen=True):
    keys: list[KeyBody]


def key_body(record: KeyRecord) -> KeyBody:
    return KeyBody(**{name: getattr(record, name) for name in KeyBody.__struct_fields__})


def new_key_body(record: KeyRecord, text: str) -> NewKeyBody:
    return NewKeyBody(key=text, **msgspec.structs.asdict(key_body(record)))


# --- decisions


class CandidateBody(msgspec.Struct, frozen=True, kw_only=True):
    replica: str
    eligible: bool
    why_not: str
    matched_tokens: int
    uncached_tokens: int
    wait_s: float
    own_s: float
    cost_s: float
    trust: Trusted
    inflight: int
    away_s: float
    delayed: int


class ExplanationBody(msgspec.Struct, frozen=True, kw_only=True):
    chosen: str
    policy: str
    w: float
    reason: str
    queued: bool
    """Whether it has to wait first, because every replica is saturated or others wait already."""
    candidates: list[CandidateBody]


class DecisionBody(ExplanationBody, frozen=True, kw_only=True):
    """How a request was routed, the last time it was tried, and what became of it."""

    request_id: str
    time: float
    key_id: str
    model: str
    tries: int
    status: int
    prompt_tokens: int
    matched_tokens: int
    cached_tokens: int | None
    """What the replica reported afterwards."""
    queued_s: float
    """Of `first_byte_s`: in the queue."""
    first_byte_s: float | None
    duration_s: float


class DecisionList(msgspec.Struct, frozen=True):
    decisions: list[DecisionBody]


def explanation_body(decision: Decision, *, queued: bool) -> ExplanationBody:
    return ExplanationBody(
        chosen=decision.replica_id,
        policy=decision.policy,
        w=decision.w,
        reason=decision.reason,
        queued=queued,
        candidates=[_candidate_body(candidate) for candidate in decision.candidates],
    )


def decision_body(record: Record, decision: Decision, unix_offset: float) -> DecisionBody:
    return DecisionBody(
        **msgspec.structs.asdict(explanation_body(decision, queued=record.queued_s > 0)),
        request_id=record.request_id,
        time=record.started_at + unix_offset,
        key_id=record.key_id,
        model=record.model,
        tries=record.tries,
        status=record.status,
        prompt_tokens=decision.prompt_tokens,
        matched_tokens=decision.matched_tokens,
        cached_tokens=record.usage.cached_tokens if record.usage is not None else None,
        queued_s=record.queued_s,
        first_byte_s=record.first_byte_s,
        duration_s=record.duration_s,
    )


def _candidate_body(candidate: Candidate) -> CandidateBody:
    return CandidateBody(
        replica=candidate.replica,
        eligible=candidate.eligible,
        why_not=candidate.why_not,
        matched_tokens=candidate.matched_tokens,
        uncached_tokens=candidate.uncached_tokens,
        wait_s=candidate.wait_s,
        own_s=candidate.own_s,
        cost_s=candidate.cost_s,
        trust=candidate.trust.value,
        inflight=candidate.inflight,
        away_s=candidate.away_s,
        delayed=candidate.delayed,
    )
