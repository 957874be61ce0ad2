"""What `warmpath up` says when something breaks while it starts; whole systems are in `tests/system/test_up.py`."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import click
import httpx
import pytest

from gateway.commands.up import Children, _deaths_first, _require_free


async def test_a_connection_that_a_dead_child_broke_is_told_as_its_death(tmp_path: Path) -> None:
    children = Children(tmp_path)
    child = await children.start("worker-0", ["no_such_module"])
    await child.process.wait()

    with pytest.raises(click.ClickException, match="worker-0 ended with code 1"):
        async with _deaths_first(children):
            raise httpx.ReadError("")


async def test_a_connection_that_broke_by_itself_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(click.ClickException, match="the gateway does not answer: ReadTimeout"):
        async with _deaths_first(Children(tmp_path)):
            raise httpx.ReadTimeout("")


def test_a_port_that_may_not_be_used_is_not_called_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)

    with pytest.raises(click.ClickException, match=r"port 80 cannot be used \(Permission denied\); .* PORT=90"):
        _require_free("PORT", 80)
