"""Keys: every change waits for the disk, so it happens in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from gateway.admin.bodies import (
    KeyBody,
    KeyList,
    KeyRequest,
    NewKeyBody,
    key_body,
    new_key_body,
)
from gateway.admin.context import AdminContext
from gateway.admin.rest import Call, Endpoint, Needs
from gateway.api_error import ApiError
from gateway.keys import KeyStoreError

__all__ = ["KEY_ENDPOINTS"]


async def _create_key(context: AdminContext, call: Call) -> NewKeyBody:
    wanted: KeyRequest = call.body
    expires = context.wall_clock() + wanted.expires_in_s if wanted.expires_in_s is not None else None
    try:
        record, text = await asyncio.to_thread(
            context.keys.create,
            wanted.kind,
            name=wanted.name,
            tenant=wanted.tenant,
            group=wanted.group,
            debug=wanted.debug,
            expires=expires,
            requests_per_minute=wanted.requests_per_minute,
        )
    except KeyStoreError as error:
        raise _storage_failed() from error
    return new_key_body(record, text)


async def _list_keys(context: AdminContext, call: Call) -> KeyList:
    return KeyList([key_body(record) for record in context.keys.records()])


async def _revoke_key(context: AdminContext, call: Call) -> KeyBody:
    key_id = call.path["key_id"]
    if [record.id for record in context.keys.usable("admin")] == [key_id]:
        raise ApiError(409, "last_admin_key", "This is the last valid admin key: make another one first.")
    try:
        record = await asyncio.to_thread(context.keys.revoke, key_id)
    except KeyStoreError as error:
        raise _storage_failed() from error
    if record is None:
        raise ApiError(404, "key_not_found", "There is no such key.")
    return key_body(record)


def _storage_failed() -> ApiError:
    return ApiError(500, "storage_failed", "The key store cannot be written; nothing was changed.")


KEY_ENDPOINTS: Final[Sequence[Endpoint[AdminContext]]] = (
    Endpoint(
        method="POST",
        path="/admin/v1/keys",
        needs=Needs.ADMIN,
        summary="Make a key; its text is shown this once",
        handle=_create_key,
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
        method="DELETE",
        path="/admin/v1/keys/{key_id}",
        needs=Needs.ADMIN,
        summary="Revoke a key",
        handle=_revoke_key,
        answer=KeyBody,
    ),
)
