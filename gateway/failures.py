"""What a client is told when no replica answered. Pure.

Nothing of a replica's own text is in it, except where the replica refuses the client's request itself.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from gateway.api_error import ApiError
from gateway.openai import GenerationRequest
from gateway.upstream.contract import ConnectFailed, UpstreamTimeout
from router import Dropped, Unroutable

__all__ = [
    "all_busy",
    "bad_upstream",
    "not_admitted",
    "overloaded",
    "passed_on",
    "quarantined",
    "shutting_down",
    "unroutable",
    "unsupported",
    "upstream_error",
]

_MAX_TOLD_CHARS: Final = 200


def quarantined(status: int) -> ApiError:
    message = "Replicas were lost while they answered this request, so it is not sent to another one for a while."
    return ApiError(status, "request_quarantined", message, should_retry=False)


def overloaded() -> ApiError:
    message = "The gateway has no room for another connection to a replica. Try again later."
    return ApiError(503, "gateway_overloaded", message, retry_after_s=1.0)


def shutting_down() -> ApiError:
    message = "The gateway was stopped before this answer was complete. Another one may take the request."
    return ApiError(503, "gateway_shutdown", message, retry_after_s=1.0)


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
        told = model[:_MAX_TOLD_CHARS]
        return ApiError(404, "model_not_found", f"The model '{told}' does not exist.", param="model")
    if why.code == "capacity":
        return all_busy(why.retry_after_s)
    return ApiError(
        503, "no_replica", f"No replica of '{model}' can take requests now.", retry_after_s=why.retry_after_s
    )


def not_admitted(why: Dropped | Unroutable, model: str) -> ApiError:
    """No replica for it: there is none, or the queue before them did not let it through."""
    if isinstance(why, Unroutable):
        return unroutable(why, model)
    if why.why == "no_replica":
        return unroutable(Unroutable("no_replica", why.retry_after_s), model)
    error = all_busy(why.retry_after_s)
    if why.in_vain:
        error.should_retry = False  # an SDK would come back three times within the time that it would have to wait
    return error


def all_busy(retry_after_s: float) -> ApiError:
    return ApiError(
        429, "capacity", "All replicas of this model are busy. Try again later.", retry_after_s=retry_after_s
    )


def unsupported(request: GenerationRequest) -> ApiError:
    return ApiError(
        404,
        "unsupported_endpoint",
        f"The replicas of '{request.model}' do not serve {request.endpoint}.",
        param="model",
    )


class _Detail(msgspec.Struct):
    code: Any = None


class _Refusal(msgspec.Struct):
    error: _Detail | str | None = None
    message: Any = None
    detail: Any = None


_refusal_decoder = msgspec.json.Decoder(_Refusal)


def passed_on(status: int, body: bytes, request: GenerationRequest) -> tuple[int, bytes]:
    """A replica's 4xx or 501, which is about the client's request → what the client gets: the same bytes where they are in
    OpenAI's shape, else its words in it; and one clear answer where the replica lacks the route.

    Raises `msgspec.MsgspecError` when the body is no JSON object.
    """
    told = _refusal_decoder.decode(body)
    status = 400 if status == 422 else status
    is_ours = isinstance(told.error, _Detail)
    lacks_route = not is_ours or (isinstance(told.error, _Detail) and told.error.code == "not_found")
    if status == 501 or (status in (404, 405) and lacks_route and not request.subpath):
        refusal = unsupported(request)
        return refusal.status, refusal.body()
    if is_ours:
        return status, body
    words = next((text for text in (told.message, told.error, told.detail) if isinstance(text, str)), None)
    refusal = ApiError(status, "refused", words or "The replica refused this request.")
    return refusal.status, refusal.body()
