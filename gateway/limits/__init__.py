"""Who may use how much: requests and tokens a minute, parallel requests, daily budgets; of keys, tenants and models."""

from gateway.limits.quota import Quota
from gateway.limits.request_limiter import Admitted, Refused, RequestLimiter, limit_headers

__all__ = ["Admitted", "Quota", "Refused", "RequestLimiter", "limit_headers"]
