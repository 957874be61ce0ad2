"""Keys: make, show, change, rotate, revoke. Every change waits for the storage, which may be a disk or Redis."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from gateway.admin.bodies import (
    KeyBody,
    KeyList,
    KeyPatch,
    KeyRequest,
    NewKeyBody,
    RotateRequest,
    key_body,
    new_key_body,
)
from gateway.admin.context import AdminContext
from gateway.admin.idempotency import AnotherBody
from gateway.admin.rest import Call, Endpoint
from gateway.api_document import Needs
from gateway.api_error import ApiError
from gateway.keys import KeyConflict, KeyStoreError, UnknownKey

__all__ = ["KEY_ENDPOINTS"]

_log = logging.getLogger("warmpath.keys")

_IDEMPOTENCY_KEY: Final = re.compile(rb"[\x21-\x7e]{1,255}")


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What stops a change, as an answer."""
    try:
        yield
    except UnknownKey:
        raise ApiError(404, "key_not_found", "There is no such key.") from None
    except KeyConflict as error:
        raise ApiError(409, error.code, str(error)) from error
    except KeyStoreError as error:
        _log.error("keys: not changed: %s", error)
        message = "The storage of the keys does not work now. Look at the list of keys before you try again."
        raise ApiError(503, "storage_unavailable", message, should_retry=False) from error


async def _create_key(context: AdminContext, call: Call) -> NewKeyBody:
    wanted: KeyRequest = call.body

    async def create() -> NewKeyBody:
        record, text = await context.keys.create(
            wanted.kind,
            name=wanted.name,
            tenant=wanted.tenant,
            group=wanted.group,
            scopes=wanted.scopes,
            models=wanted.models,
            limits=wanted.limits,
            expires=_expiry(context, wanted.expires_in_s),
            debug=wanted.debug,
        )
        return new_key_body(record, text)

    with _told():
        if call.idempotency_key is None:
            return await create()
        if not _IDEMPOTENCY_KEY.fullmatch(call.idempotency_key):
            raise ApiError(400, "invalid_value", "An Idempotency-Key has 1 to 255 visible ASCII characters.")
        try:
            return await context.created_keys.once(
                call.caller.id, call.idempotency_key, msgspec.json.encode(wanted), create
            )
        except AnotherBody:
            message = "This Idempotency-Key was used for another key."
            raise ApiError(409, "idempotency_conflict", message) from None


async def _list_keys(context: AdminContext, call: Call) -> KeyList:
    return KeyList([key_body(record) for record in context.keys.ring.records()])


async def _show_key(context: AdminContext, call: Call) -> KeyBody:
    with _told():
        record = context.keys.ring.get(call.path["key_id"])
        if record is None:
            raise UnknownKey
        return key_body(record)


async def _patch_key(context: AdminContext, call: Call) -> KeyBody:
    wanted: KeyPatch = call.body
    changes: dict[str, Any] = {
        name: value for name, value in msgspec.structs.asdict(wanted).items() if value is not msgspec.UNSET
    }
    if "expires_in_s" in changes:
        changes["expires"] = _expiry(context, changes.pop("expires_in_s"))
    with _told():
        try:
            return key_body(await context.keys.patch(call.path["key_id"], changes))
        except msgspec.ValidationError as error:
            raise ApiError(400, "invalid_value", f"Invalid limits: {error}", param="limits") from error


async def _rotate_key(context: AdminContext, call: Call) -> NewKeyBody:
    wanted: RotateRequest = call.body
    with _told():
        return new_key_body(*await context.keys.rotate(call.path["key_id"], wanted.overlap_s))


async def _revoke_key(context: AdminContext, call: Call) -> KeyBody:
    with _told():
        return key_body(await context.keys.revoke(call.path["key_id"]))


def _expiry(context: AdminContext, expires_in_s: float | None) -> float | None:
    return None if expires_in_s is None else context.wall_clock() + expires_in_s


KEY_ENDPOINTS: Final[Sequence[Endpoint[AdminContext]]] = (
    Endpoint(
        method="POST",
        path="/admin/v1/keys",
        needs=Needs.ADMIN,
        summary="Make a key; its text is shown this once",
        handle=_create_key,
        failures=(503,),
        body=KeyRequest,
        answer=NewKeyBody,
        status=201,
    ),
    Endpoint(
        method="GET",
        path="/admin/v1/keys",
        needs=Needs.ADMIN,
        summary="List the keys, without what could open anything",
        handle=_list_keys,
        answer=KeyList,
    ),
    Endpoint(
        method="GET",
        path="/admin/v1/keys/{key_id}",
        needs=Needs.ADMIN,
        summary="Show a key, without what could open anything",
        handle=_show_key,
        answer=KeyBody,
    ),
    Endpoint(
        method="PATCH",
        path="/admin/v1/keys/{key_id}",
        needs=Needs.ADMIN,
        summary="Change what a key may",
        handle=_patch_key,
        failures=(503,),
        body=KeyPatch,
        answer=KeyBody,
    ),
    Endpoint(
        method="POST",
        path="/admin/v1/keys/{key_id}/rotate",
        needs=Needs.ADMIN,
        summary="Make a key's successor, and let the old one end after a while",
        handle=_rotate_key,
        failures=(503,),
        body=RotateRequest,
        answer=NewKeyBody,
        status=201,
    ),
    Endpoint(
        method="DELETE",
        path="/admin/v1/keys/{key_id}",
        needs=Needs.ADMIN,
        summary="Revoke a key",
        handle=_revoke_key,
        failures=(503,),
        answer=KeyBody,
    ),
)
