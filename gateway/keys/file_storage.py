"""Keys in a folder: ``keys.json`` for the records, ``secrets.json`` for what makes their digests, both mode 0600.

One gateway owns a folder. Files are replaced whole by rename and are on disk when a change counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import tempfile
import threading
from pathlib import Path
from typing import Final, Literal

import msgspec

from gateway.keys.ring import KeySecrets
from gateway.keys.store import KeyStoreError, version_of

__all__ = ["FileStorage", "read_or_make_secrets"]

_SECRET_BYTES: Final = 32


class FileStorage:
    is_shared = False

    def __init__(self, folder: Path) -> None:
        """Makes the folder if there is none. Raises `KeyStoreError`."""
        self._path = folder / "keys.json"
        self._lock = threading.Lock()
        _make_folder(folder)

    @property
    def place(self) -> str:
        return str(self._path)

    async def load(self) -> bytes | None:
        return await asyncio.to_thread(self._load)

    async def version(self) -> str:
        return version_of(await self.load())

    async def replace(self, document: bytes, expected: str) -> bool:
        return await asyncio.to_thread(self._replace, document, expected)

    async def aclose(self) -> None:
        pass

    def _load(self) -> bytes | None:
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise KeyStoreError(f"cannot read {self._path}: {error.strerror}") from None

    def _replace(self, document: bytes, expected: str) -> bool:
        with self._lock:
            if version_of(self._load()) != expected:
                return False
            try:
                _write_whole(self._path, document)
            except OSError as error:
                raise KeyStoreError(f"cannot write {self._path}: {error.strerror}") from error
            return True


class _SecretsFile(msgspec.Struct, forbid_unknown_fields=True):
    pepper: str
    fleet_secret: str
    v: Literal[1] = 1


def read_or_make_secrets(
    folder: Path, *, pepper: bytes | None, fleet_secret: bytes | None, have_keys: bool
) -> KeySecrets:
    """What is not given is read from the folder, and made there if there are no keys yet. Raises `KeyStoreError`."""
    if pepper is not None and fleet_secret is not None:
        return KeySecrets(pepper, fleet_secret)
    path = folder / "secrets.json"
    _make_folder(folder)
    try:
        if not path.exists():
            if have_keys and pepper is None:
                raise KeyStoreError(
                    f"{path} is missing, and without the pepper in it no stored key is valid: restore it, give the pepper "
                    "(keys.pepper), or remove the stored keys"
                )
            made = _SecretsFile(pepper=secrets.token_hex(_SECRET_BYTES), fleet_secret=secrets.token_hex(_SECRET_BYTES))
            _write_whole(path, msgspec.json.encode(made))
        found = msgspec.json.decode(path.read_bytes(), type=_SecretsFile)
        kept = KeySecrets(bytes.fromhex(found.pepper), bytes.fromhex(found.fleet_secret))
        if min(len(kept.pepper), len(kept.fleet_secret)) < _SECRET_BYTES:
            raise ValueError("too short")
    except OSError as error:
        raise KeyStoreError(f"cannot use {path}: {error.strerror}") from None
    except ValueError:  # the message of a decoder could repeat what it read
        raise KeyStoreError(f"{path} does not hold a pepper and a fleet secret of 32 bytes in hex") from None
    return KeySecrets(pepper or kept.pepper, fleet_secret or kept.fleet_secret)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise KeyStoreError(f"cannot use {folder}: {error.strerror}") from None


def _write_whole(path: Path, body: bytes) -> None:
    """Write a file whole or not at all, readable by its owner only, and on disk when this returns."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
