"""What a change of settings means for a gateway that runs. Pure: two settings in, a plan out.

What must hold: the plan's settings are what the gateway is then run by, so whoever asks for them is told the truth; what would
need another socket, file or index keeps its old value until the gateway is started again. A setting not named here does, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel

from gateway.settings import Settings

__all__ = ["Plan", "plan_reload"]

_LIVE: Final = frozenset(
    {
        *("replicas", "routing", "prompts", "stream", "limits", "tenants", "models", "aliases"),
        *("probes", "leases", "registry", "admission"),
    }
)
_ALSO_LIVE: Final = (("keys", "static"),)
"""Within groups that are not."""
_NOT_LIVE: Final = (("routing", "index_bytes"), ("limits", "hosts"))
"""Within groups that are: the index and the ledger are laid out for them."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Names are dotted, as in the file."""

    settings: Settings
    """In force from then on."""
    changed: tuple[str, ...]
    needs_restart: tuple[str, ...]


def plan_reload(old: Settings, new: Settings) -> Plan:
    """`old`: in force now."""
    names = tuple(_differences(old, new, ""))
    needs_restart = tuple(name for name in names if not _is_live(name))
    kept = {name: getattr(old, name) for name in type(old).model_fields if name not in _LIVE}
    for group, name in _ALSO_LIVE:
        kept[group] = getattr(old, group).model_copy(update={name: getattr(getattr(new, group), name)})
    for group, name in _NOT_LIVE:
        kept[group] = getattr(new, group).model_copy(update={name: getattr(getattr(old, group), name)})
    return Plan(
        settings=new.model_copy(update=kept),
        changed=tuple(name for name in names if name not in needs_restart),
        needs_restart=needs_restart,
    )


def _is_live(name: str) -> bool:
    path = tuple(name.split("."))
    return path in _ALSO_LIVE or (path[0] in _LIVE and path not in _NOT_LIVE)


def _differences(old: BaseModel, new: BaseModel, prefix: str) -> Iterator[str]:
    """Lists, and groups whose names are the operator's own, are one value."""
    for name in type(old).model_fields:
        before, after = getattr(old, name), getattr(new, name)
        if isinstance(before, BaseModel) and isinstance(after, BaseModel):
            yield from _differences(before, after, f"{prefix}{name}.")
        elif before != after:
            yield f"{prefix}{name}"
