"""One request as the gateway sees it: what is to be done (`Job`), and what came of it (`Record`)."""

from __future__ import annotations

import msgspec

from gateway.openai import GenerationRequest, Usage
from gateway.prepare import PreparedPrompt
from gateway.retries import Fingerprint, fingerprint
from gateway.tracing import UNTRACED, Trace
from router import Decision, Priority

__all__ = ["Job", "Record"]


class Job(msgspec.Struct, frozen=True):
    """A request that may run: authenticated, within its limits, with its prompt known."""

    request: GenerationRequest
    prompt: PreparedPrompt
    salt: str
    seed: int
    """The client's, or one drawn here, so that a second try gives the same text."""
    request_id: str
    debug: bool
    """Whether the client may see how it was routed."""
    owner: str
    """The tenant: who waits for its turn with others, and whose responses are found again by their id."""
    weight: float = 1.0
    """Of the tenant, against others."""
    priority: Priority = Priority.DEFAULT
    home: str | None = None
    """The replica that keeps what this request is about. No other one could answer."""
    staged: bool = False
    """Whether it lets others catch up between its stages (`gateway.stages`)."""

    @property
    def fingerprint(self) -> Fingerprint:
        return fingerprint(self.salt, self.request.body or self.request.path.encode())


class Record(msgspec.Struct):
    """What happened to a request: filled in as it happens, read once at its end by log, metrics and the decision ring."""

    request_id: str
    endpoint: str
    started_at: float
    """Monotonic, seconds, as all times here."""
    trace: Trace = msgspec.field(default_factory=lambda: UNTRACED)  # as a default msgspec takes immutable structs only
    method: str = "POST"
    model: str = ""
    stream: bool = False
    key_id: str = ""
    tenant: str = ""
    client_retries: int = 0
    """How often the client's SDK says that it tried before."""
    decision: Decision | None = None
    queued_s: float = 0.0
    """What it waited before replicas that were all saturated."""
    tries: int = 0
    status: int = 0
    error_code: str = ""
    first_byte_s: float | None = None
    """Of a generated answer; None of any other."""
    duration_s: float = 0.0
    usage: Usage | None = None
    output_events: int = 0
    """Events of a stream that carried output: about as many tokens."""
    is_answered: bool = False
    """Whether a replica gave a whole answer, or all of a stream."""
    limit: str = ""
    """The measure of the limit that refused it; '' when none did."""

    @property
    def ended_at(self) -> float:
        """Of one that has ended."""
        return self.started_at + self.duration_s
