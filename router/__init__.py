"""Decides where a prompt goes. Pure: values in, values out; no sockets, tasks, clock, randomness or logging.

What the gateway needs is named here. What crosses a process is in `router.wire`, prompts are in `router.prompt`.
"""

from router.blocks import BLOCK_SIZE, BlockName, block_names, chunk_names, root_name
from router.breaker import BreakerState
from router.fair_queue import Priority
from router.fleet import Outcome, ReplicaView, Reservation, ReservationError
from router.gate import Asked, Dropped, Failed, Gate, GateSettings, GateView, Placed
from router.id_text import IdTexts
from router.name_cache import NameCache
from router.policies import Candidate
from router.pool import Pool, PoolMismatch
from router.route import Decision, Query, Router, UnknownReplica, Unroutable
from router.settings import PolicyName, RoutingSettings
from router.trust import Accuracy, Sync, Trust

__all__ = [
    "BLOCK_SIZE",
    "Accuracy",
    "Asked",
    "BlockName",
    "BreakerState",
    "Candidate",
    "Decision",
    "Dropped",
    "Failed",
    "Gate",
    "GateSettings",
    "GateView",
    "IdTexts",
    "NameCache",
    "Outcome",
    "Placed",
    "PolicyName",
    "Pool",
    "PoolMismatch",
    "Priority",
    "Query",
    "ReplicaView",
    "Reservation",
    "ReservationError",
    "Router",
    "RoutingSettings",
    "Sync",
    "Trust",
    "UnknownReplica",
    "Unroutable",
    "block_names",
    "chunk_names",
    "root_name",
]
