"""Other names for models. Pure: a request for an alias becomes one for its model before anything is looked up by it.

Whoever may use which name is asked before, about the name that the client sent. The answer's `model` stays what the replica
says, as OpenAI's own aliases are answered with the model that served them, so an answer is never rewritten for it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gateway.openai import GenerationRequest

__all__ = ["Aliases"]


class Aliases:
    def __init__(self, targets: Mapping[str, str]) -> None:
        """`targets`: model by alias."""
        self._targets = dict(targets)

    def configure(self, targets: Mapping[str, str]) -> None:
        """For requests from now on."""
        self._targets = dict(targets)

    def target(self, name: str) -> str:
        """The model that is meant by a name, which may be its own."""
        return self._targets.get(name, name)

    def of(self, model: str) -> list[str]:
        """Its other names, sorted."""
        return sorted(alias for alias, target in self._targets.items() if target == model)

    def hides(self, model: str) -> bool:
        """Whether the name means another model."""
        return model in self._targets

    def resolve(self, request: GenerationRequest) -> GenerationRequest:
        """The same request for the model that is meant; itself when it names that."""
        model = self._targets.get(request.model)
        if model is None:
            return request
        return msgspec.structs.replace(request, model=model, body=_with_model(request.body, model))


def _with_model(body: bytes, model: str) -> bytes:
    """Every other value keeps its bytes and its place."""
    if not body:
        return body
    members = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    members["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(members)
