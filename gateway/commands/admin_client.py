"""What commands that ask a running gateway share: its admin API as a client with one-line errors, and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import click
import httpx
import msgspec
from rich import box
from rich.console import Console
from rich.table import Column, Table

__all__ = ["AdminClient", "admin_client", "admin_options", "new_table", "terminal"]

_TIMEOUT_S: Final = 5.0
_STREAM_S: Final = 30.0
"""Of silence; a stream carries a comment every 10 s."""
_PIPE_WIDTH: Final = 240
_CONNECTION: Final = Path(".warmpath/connection.json")


class _Connection(msgspec.Struct):
    admin_url: str
    admin_key: str


class AdminClient:
    """The admin API of one gateway. Every failure is one line and exit code 1."""

    def __init__(self, url: str, key: str) -> None:
        try:
            self._http = httpx.Client(
                base_url=f"{url.rstrip('/')}/admin/v1",
                headers={b"authorization": f"Bearer {key}".encode()},
                timeout=_TIMEOUT_S,
                trust_env=False,  # a proxy for the way out knows nothing of this machine or its neighbours
            )
        except httpx.InvalidURL as error:
            raise click.ClickException(f"'{url}' is no URL: {error}") from error

    def close(self) -> None:
        self._http.close()

    def call(self, method: str, path: str, body: Mapping[str, Any] | bytes | None = None) -> Any:
        """`body`: bytes are JSON already."""
        content = body if isinstance(body, bytes) or body is None else msgspec.json.encode(body)
        headers = {"content-type": "application/json"} if content is not None else {}
        try:
            answer = self._http.request(method, path, content=content, headers=headers)
        except httpx.HTTPError as error:
            raise click.ClickException(
                f"no answer from {self._http.base_url}: {str(error) or type(error).__name__}"
            ) from error
        if not answer.is_success:
            raise click.ClickException(f"{answer.status_code}: {_message(answer)}")
        return answer.json() if answer.content else None

    def events(self, path: str) -> Iterator[Any]:
        """What a stream of server-sent events carries, for as long as it lasts."""
        try:
            with self._http.stream("GET", path, timeout=_STREAM_S) as answer:
                if not answer.is_success:
                    answer.read()
                    raise click.ClickException(f"{answer.status_code}: {_message(answer)}")
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        yield msgspec.json.decode(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            raise click.ClickException(
                f"no answer from {self._http.base_url}: {str(error) or type(error).__name__}"
            ) from error


def terminal() -> Console:
    """Into a pipe go whole lines, however long; rich would fold them at 80 characters."""
    console = Console()
    return console if console.is_terminal else Console(width=_PIPE_WIDTH)


def new_table(*columns: str) -> Table:
    return Table(*(Column(name, no_wrap=True) for name in columns), box=box.SIMPLE_HEAD, pad_edge=False)


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.reason_phrase


def admin_client(url: str | None, key: str | None, connection: Path) -> AdminClient:
    """Until the command ends. From flags or environment, else from the file that `warmpath up` wrote here."""
    if url is None or key is None:
        try:
            known = msgspec.json.decode(connection.read_bytes(), type=_Connection)
        except (OSError, msgspec.MsgspecError) as error:
            raise click.UsageError("give --admin-url and --admin-key; no `warmpath up` runs in this folder") from error
        url, key = url or known.admin_url, key or known.admin_key
    client = AdminClient(url, key)
    click.get_current_context().call_on_close(client.close)
    return client


def admin_options(command: Any) -> Any:
    for option in (
        click.option("--admin-url", envvar="WARMPATH_ADMIN_URL", help="Default: the system `warmpath up` runs here."),
        click.option("--admin-key", envvar="WARMPATH_ADMIN_KEY", help="An admin key (wpa-…)."),
        click.option(
            "--connection",
            type=click.Path(dir_okay=False, path_type=Path),
            default=_CONNECTION,
            show_default=True,
            help="File that holds both.",
        ),
    ):
        command = option(command)
    return command
