"""Three real customer-service talks (tau-bench retail, MIT), as chats that grow turn by turn."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

import msgspec

__all__ = ["Message", "Talk", "load_talks"]

_NAMES: Final = ("gift card", "new address", "bookshelf")
_LINE: Final = re.compile(r"^(user|assistant|tool): (.*?)(?=^(?:user|assistant|tool): |\Z)", re.DOTALL | re.MULTILINE)

Message = dict[str, Any]
"""One message in OpenAI's form."""


@dataclass(frozen=True, slots=True)
class Talk:
    name: str
    messages: list[Message]

    def turns(self) -> Iterator[list[Message]]:
        """The chat as it stood each time that the customer had just spoken."""
        for end, message in enumerate(self.messages, start=1):
            if message["role"] == "user":
                yield self.messages[:end]


def load_talks() -> list[Talk]:
    text = (files("loadtest") / "data" / "retail_talks.jsonl").read_text()
    rows = [msgspec.json.decode(line)["messages_display"] for line in text.splitlines()]
    return [Talk(name, _messages(row)) for name, row in zip(_NAMES, rows, strict=True)]


def _messages(display: str) -> list[Message]:
    """The printed form names no tool: an assistant that says ``None`` called one, and the next line is its result."""
    messages: list[Message] = []
    for number, match in enumerate(_LINE.finditer(display)):
        role, text = match[1], match[2].strip()
        if role == "assistant" and text == "None":
            call = {"id": f"call_{number + 1}", "type": "function", "function": {"name": "lookup", "arguments": "{}"}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif role == "tool":
            messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": text})
        else:
            messages.append({"role": role, "content": text})
    return messages
