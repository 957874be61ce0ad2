"""What a client is told when no replica answered. Pure.

Nothing of a replica's own text is in it, except where the replica refuses the client's request itself.
"""

from __future__ import annotations

from gateway.openai import ApiError
from gateway.upstream import ConnectFailed, UpstreamTimeout
from router import Unroutable

__all__ = ["all_busy", "bad_upstream", "quarantined", "unroutable", "upstream_error"]


def quarantined(status: int) -> ApiError:
    message = "Replicas were lost while they answered this request, so it is not sent to another one for a while."
    return ApiError(status, "request_quarantined", message, should_retry=False)


def bad_upstream(message: str) -> ApiError:
    return ApiError(502, "bad_upstream", message)


def upstream_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ConnectFailed):
        return ApiError(503, "no_replica", "No replica of this model can be reached.", retry_after_s=1.0)
    if isinstance(error, UpstreamTimeout):
        return ApiError(504, "upstream_timeout", "No replica gave a first token in time.")
    return bad_upstream("A replica broke off before it answered.")


def unroutable(why: Unroutable, model: str) -> ApiError:
    if why.code == "model_not_found":
        return ApiError(404, "model_not_found", f"The model '{model}' does not exist.", param="model")
    if why.code == "capacity":
        return all_busy(why.retry_after_s)
    return ApiError(
        503, "no_replica", f"No replica of '{model}' can take requests now.", retry_after_s=why.retry_after_s
    )


def all_busy(retry_after_s: float) -> ApiError:
    return ApiError(
        429, "capacity", "All replicas of this model are busy. Try again later.", retry_after_s=retry_after_s
    )
