"""The default model, for tests marked `model`: fetched once into the user's cache, then read from there.

Without a network such a test is skipped, which CI does not allow (tests/conftest.py).
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

from workers.hub import cache_dir, resolve
from workers.model_errors import ModelNotFound


@cache
def default_model() -> Path:
    override = os.environ.get("WARMPATH_CACHE")
    try:
        return resolve("default", Path(override) if override else cache_dir(os.environ)).path
    except ModelNotFound as error:
        pytest.skip(str(error))
