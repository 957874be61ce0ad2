"""docs/gateway.md says what the code does: its endpoints, its error codes, its limits. What any page names is there."""

from __future__ import annotations

import re
from pathlib import Path

from gateway.openai import ENDPOINTS
from gateway.server.connection import ListenerLimits

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "gateway.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_FOR_CLIENTS = {ROOT / "gateway" / "admin", ROOT / "gateway" / "commands"}


def test_every_endpoint_is_named() -> None:
    assert {path for path in ENDPOINTS if f"{path}`" not in TEXT} == set()


def test_every_error_that_a_client_can_get_is_named() -> None:
    sources = "".join(
        file.read_text()
        for file in sorted((ROOT / "gateway").rglob("*.py"))
        if not NOT_FOR_CLIENTS.intersection(file.parents)
    )
    codes = set(re.findall(r'ApiError\(\s*\w+,\s*"(\w+)"', sources)) | set(re.findall(r'code="(\w+)"', sources))

    assert len(codes) > 30
    assert {code for code in codes if f"`{code}`" not in TEXT} == set()


def test_the_listeners_limits_are_those_in_the_table() -> None:
    limits = ListenerLimits()

    for told in (
        f"{limits.head_s:.0f} s | `server.head_s`",
        f"{limits.body_s:.0f} s, and a second for each {limits.body_bytes_s / 1024:.0f} KiB",
        f"wait for the one before them | {limits.max_pipelined} |",
        f"{limits.keep_alive_s:.0f} s, above",
        f"is cut after {limits.write_stall_s:.0f} s",
    ):
        assert told in TEXT, told


def test_every_link_and_file_of_every_page_is_there() -> None:
    missing = []
    for page in PAGES:
        text = page.read_text()
        links = [page.parent / link for link in re.findall(r"\]\((?!https?:)([^)#\s]+)", text)]
        files = [
            ROOT / name
            for name in re.findall(r"`((?:gateway|router|workers|loadtest|tests|deploy|docs)/[\w./-]+)`", text)
        ]
        missing += [f"{page.name}: {path}" for path in (*links, *files) if not path.exists()]

    assert missing == []


def test_every_python_module_that_a_page_names_is_there() -> None:
    known = {
        file.relative_to(ROOT).as_posix()
        for folder in ("gateway", "router", "workers", "loadtest", "tests")
        for file in (ROOT / folder).rglob("*.py")
    }
    missing = [
        f"{page.name}: {name}"
        for page in PAGES
        for name in re.findall(r"`([\w/]+\.py)`", page.read_text())
        if not any(path == name or path.endswith(f"/{name}") for path in known)
    ]

    assert missing == []


def test_every_module_has_its_place_in_the_map() -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    section = page.partition("## Where things are\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", section))
    modules = {
        file.stem
        for package in ("router", "gateway", "loadtest")
        for file in (ROOT / package).rglob("*.py")
        if file.parent.name != "commands" and not file.stem.startswith("__")
    }

    assert named == modules
