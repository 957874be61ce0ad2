"""Keys: who may use the gateway, for which tenant, and how much.

    texts           what a key looks like
    records         what is known of one, and the changes that may be made            pure
    ring            all of them as a value: identify, salts                           pure
    sealed          all of them as a document                                         pure
    store           the ring that counts now, over a storage
    file_storage    a folder
    redis_storage   a Redis that gateways share
    opening         the store that the settings ask for (not imported here: settings know keys)

No key's text is stored, logged or put into an error.
"""

from gateway.keys.records import (
    ALL_SCOPES,
    KeyConflict,
    KeyRecord,
    KeyScope,
    Label,
    ModelPattern,
    UnknownKey,
    checked_label,
    checked_pattern,
)
from gateway.keys.ring import KeyRing, KeySecrets, RingHolder, RingSource
from gateway.keys.store import GivenKey, KeyStore, KeyStoreError
from gateway.keys.texts import KeyKind

__all__ = [
    "ALL_SCOPES",
    "GivenKey",
    "KeyConflict",
    "KeyKind",
    "KeyRecord",
    "KeyRing",
    "KeyScope",
    "KeySecrets",
    "KeyStore",
    "KeyStoreError",
    "Label",
    "ModelPattern",
    "RingHolder",
    "RingSource",
    "UnknownKey",
    "checked_label",
    "checked_pattern",
]
