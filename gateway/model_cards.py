"""What replicas say of their models, and ``/v1/models`` made of it. Pure: told by `gateway.watch`, asked by `gateway.public`.

A pool shows what holds for all its replicas: the smallest `max_model_len` of those that told one. `root` and `parent` are as in
vLLM: the base model of an adapter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

__all__ = ["ModelCard", "ModelCards", "parse_models"]


_Name = Annotated[str, Meta(max_length=512, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
"""Room for a path, on one line: it goes into logs, metrics and answers, and a replica can say anything."""


class ModelCard(msgspec.Struct, frozen=True):
    """One model of a replica's own ``/v1/models``. Only `id` is OpenAI's."""

    id: _Name
    max_model_len: int | None = None
    root: _Name | None = None
    parent: _Name | None = None


class _Models(msgspec.Struct):
    data: list[ModelCard]


_decoder = msgspec.json.Decoder(_Models)


def parse_models(answer: bytes) -> list[ModelCard]:
    """Raises `msgspec.MsgspecError`."""
    return _decoder.decode(answer).data


class ModelCards:
    """The cards of all replicas that are watched, each of the model that it is registered with."""

    def __init__(self) -> None:
        self._cards: dict[str, ModelCard] = {}  # by replica

    def learn(self, replica_id: str, model: str, listed: Iterable[ModelCard]) -> None:
        """A replica that does not list its model tells nothing of it."""
        card = next((card for card in listed if card.id == model), None)
        if card is not None:
            self._cards[replica_id] = card

    def forget(self, replica_id: str) -> None:
        self._cards.pop(replica_id, None)

    def max_model_len(self, model: str) -> int | None:
        """What every replica of the model takes; None when none told."""
        return min(self._lengths(model), default=None)

    def longest(self, model: str) -> int | None:
        """What the replica with the most room takes; None when none told."""
        return max(self._lengths(model), default=None)

    def entry(self, model: str, created: float, name: str = "") -> dict[str, Any]:
        """The model as ``/v1/models`` shows it, perhaps under another `name`."""
        told = next((card for card in self._cards.values() if card.id == model), ModelCard(model))
        return {
            "id": name or model,
            "object": "model",
            "created": int(created),
            "owned_by": "warmpath",
            "root": told.root or model,
            "parent": told.parent,
            "max_model_len": self.max_model_len(model),
        }

    def _lengths(self, model: str) -> list[int]:
        return [card.max_model_len for card in self._cards.values() if card.id == model and card.max_model_len]
