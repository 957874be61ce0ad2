"""How one chat's answer is to be read, and what it has to be: which tags count, given the tools and the end of the prompt; and
the grammar of what must come. Pure, but for the time that a grammar takes to be tried.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import xxhash

from workers.api_error import invalid_value
from workers.constraint import Constraint, content_constraint
from workers.message import MessageParser
from workers.openai import GenerationRequest, ToolUse
from workers.tags import ReasoningState
from workers.tool_choice import call_constraint

__all__ = ["asks_for_constraint", "constraint_of", "parser_of"]

_ANY_TEXT: Final[dict[str, Any]] = {"type": "text"}


def parser_of(
    request: GenerationRequest, state: ReasoningState | None, *, index: int, response_id: str
) -> MessageParser | None:
    """None where all that is said is content. `state`: what the prompt leaves to the answer, None with a model that never
    thinks aloud. The ids of calls follow from the answer's, so they are the same wherever it goes on.
    """
    tools = request.tool_use is not None and request.tool_use.choice != "none"
    thinks = state in ("open", "none")
    if not tools and not thinks:
        return None
    return MessageParser(
        tools=tools,
        parallel=request.tool_use is None or request.tool_use.parallel,
        reasoning=thinks,
        reasoning_open=state == "open",
        call_id=lambda number: f"call_{xxhash.xxh3_64_hexdigest(f'{response_id}/{index}/{number}'.encode())}",
    )


def asks_for_constraint(request: GenerationRequest) -> bool:
    return bool(
        request.response_format not in (None, _ANY_TEXT)
        or request.structured_outputs
        or (request.tool_use is not None and request.tool_use.forced)
    )


def constraint_of(request: GenerationRequest) -> Constraint | None:
    """Raises `ApiError` 400 for what is no grammar, or more than one."""
    content = content_constraint(request.response_format, request.structured_outputs)
    calls = _call_constraint(request.tool_use) if request.tool_use is not None else None
    if content is not None and calls is not None:
        raise invalid_value(f"'{content.param}' and a forced tool call exclude each other.", content.param)
    constraint = content or calls
    if constraint is not None:
        from workers.grammar_check import check  # needs llguidance, which simulated replicas do without

        check(constraint)
    return constraint


def _call_constraint(use: ToolUse) -> Constraint | None:
    choice: Any = use.choice
    if choice == "named":
        choice = {"type": "function", "function": {"name": use.name}}
    return call_constraint(msgspec.to_builtins(list(use.tools)), choice, use.parallel)
