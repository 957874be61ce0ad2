"""Who may use how much: requests and tokens a minute, parallel requests, daily budgets; of keys, tenants and models.

quota        what somebody may use
rules        which limits a request is under, and what it takes of them
counters     what counts against one limit now
ledger       all counters; takes from many or from none
reservation  what a request took, until it ends
limiter      reservations where the ledger is in the same process
headers      what clients are told
"""

from gateway.limits.headers import LOCAL_HEADER, limit_headers, refusal_error, refusal_headers
from gateway.limits.leases import LeasingLimiter
from gateway.limits.ledger import Ledger, Limit, Measure, Refused
from gateway.limits.limiter import Limiter, LocalLimiter
from gateway.limits.link import LedgerLink, LedgerServer, LedgerUnavailable, RemoteLedger
from gateway.limits.quota import Quota
from gateway.limits.reservation import Reservation
from gateway.limits.rules import Amounts, Caller, Price, Rules

__all__ = [
    "LOCAL_HEADER",
    "Amounts",
    "Caller",
    "LeasingLimiter",
    "Ledger",
    "LedgerLink",
    "LedgerServer",
    "LedgerUnavailable",
    "Limit",
    "Limiter",
    "LocalLimiter",
    "Measure",
    "Price",
    "Quota",
    "Refused",
    "RemoteLedger",
    "Reservation",
    "Rules",
    "limit_headers",
    "refusal_error",
    "refusal_headers",
]
