"""The tests that docs/routing.md names exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_that_the_bug_list_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/routing.md").read_text()))
    written = {
        name for file in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }

    assert len(named) > 15
    assert named <= written
