"""What replicas say of their models, and ``/v1/models`` made of it. Pure: told by `gateway.watch`, asked by `gateway.public`.

A pool shows what holds for all its replicas: the smallest `max_model_len` of those that told one. `root` and `parent` are as in
vLLM: the base model of an adapter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

__all__ = ["ModelCard", "ModelCards", "parse_models"]


class ModelCard(msgspec.Struct, frozen=True):
    """One model of a replica's own ``/v1/models``. Only `id` is OpenAI's."""

    id: str
    max_model_len: int | None = None
    root: str | None = None
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[ModelCard]


_decoder = msgspec.json.Decoder(_Models)


def parse_models(answer: bytes) -> list[ModelCard]:
    """Raises `msgspec.MsgspecError`."""
    return _decoder.decode(answer).data


class ModelCards:
    """The cards of all replicas, each of the model that it is registered with."""

    def __init__(self) -> None:
        self._cards: dict[str, ModelCard] = {}  # by replica

    def learn(self, replica_id: str, model: str, listed: Iterable[ModelCard]) -> None:
        """A replica that does not list its model tells nothing of it."""
        card = next((card for card in listed if card.id == model), None)
        if card is not None:
            self._cards[replica_id] = card

    def forget(self, replica_id: str) -> None:
        self._cards.pop(replica_id, None)

    def __contains__(self, replica_id: str) -> bool:
        return replica_id in self._cards

    def max_model_len(self, replica_ids: Iterable[str]) -> int | None:
        """What each of these replicas takes; None when none told."""
        cards = map(self._cards.get, replica_ids)
        return min((card.max_model_len for card in cards if card and card.max_model_len), default=None)

    def entry(self, model: str, created: float, replica_ids: Iterable[str]) -> dict[str, Any]:
        """The model as ``/v1/models`` shows it."""
        ids = list(replica_ids)
        told = next((self._cards[each] for each in ids if each in self._cards), ModelCard(model))
        return {
            "id": model,
            "object": "model",
            "created": int(created),
            "owned_by": "warmpath",
            "root": told.root or model,
            "parent": told.parent,
            "max_model_len": self.max_model_len(ids),
        }
