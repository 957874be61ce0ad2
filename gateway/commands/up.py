"""`warmpath up`: a whole system on this machine, in the foreground, for one person.

Fetches the model, starts a gateway and its workers as child processes, waits until the first answer can be given, prints how
to use it, and ends everything when it is told to or when a child dies. Children get their own process group, so that Ctrl-C
reaches this process alone, and a death signal, so that they do not outlive it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import httpx
import msgspec

from gateway.keys import KeyKind, KeyStoreError
from gateway.keys.opening import open_key_store
from gateway.settings_loader import SettingsError, load_settings

__all__ = ["up"]

_HOST: Final = "127.0.0.1"
_GATEWAY_START_S: Final = 30.0
_WORKERS_START_S: Final = 300.0
"""A large model on a slow disk; a worker that fails is seen at once, not after this time."""
_FIRST_ANSWER_S: Final = 120.0
_POLL_S: Final = 0.1
_STOP_S: Final = 3.5
"""After this a child is killed; Ctrl-C ends everything within 5 s."""
_CLEAN_UP_S: Final = 2.0
"""For an interrupted download to remove what it has so far."""
_LOG_TAIL_LINES: Final = 8
_PR_SET_PDEATHSIG: Final = 1


class Connection(msgspec.Struct, frozen=True):
    """How to enter the system: kept in the state folder, mode 0600, for `replicas`, `keys` and `smoke`."""

    base_url: str
    api_key: str
    admin_url: str
    admin_key: str
    join_token: str


@dataclass(frozen=True, slots=True)
class Plan:
    model: str
    port: int
    admin_port: int
    workers: int
    state_dir: Path
    worker_args: tuple[str, ...]

    @property
    def connection_path(self) -> Path:
        return self.state_dir / "connection.json"


class Child:
    """A process of ours that writes to its own log file."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.process = process
        self._log = log

    def require_alive(self) -> None:
        if self.process.returncode is not None:
            raise click.ClickException(f"{self.name} ended with code {self.process.returncode}:\n{self.log_tail()}")

    def log_lines(self) -> list[str]:
        return self._log.read_text(errors="replace").splitlines()

    def log_tail(self) -> str:
        return "\n".join(f"  {line}" for line in self.log_lines()[-_LOG_TAIL_LINES:]) + f"\n  (all of it: {self._log})"


class Children:
    """Starts children and ends all of them, in every case."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self.running: list[Child] = []

    async def start(self, name: str, args: Sequence[str], env: dict[str, str] | None = None) -> Child:
        path = self._log_dir / f"{name}.log"
        with path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                *args,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **(env or {})},
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        child = Child(name, process, path)
        self.running.append(child)
        return child

    def require_alive(self) -> None:
        for child in self.running:
            child.require_alive()

    async def wait_for_a_death(self) -> Child:
        waits = {asyncio.ensure_future(child.process.wait()): child for child in self.running}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return waits[done.pop()]

    async def stop(self) -> None:
        for child in self.running:
            with contextlib.suppress(ProcessLookupError):
                child.process.terminate()
        waits = [child.process.wait() for child in self.running]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*waits), _STOP_S)
        for child in self.running:
            if child.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.process.pid, signal.SIGKILL)
                await child.process.wait()


def _die_with_parent() -> None:
    """Runs in the child before exec: the kernel ends it if this process is killed (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@click.command(
    epilog="""\b
Examples:
  warmpath up
  warmpath up --model simulated
  warmpath up --model ./Qwen2.5-0.5B-Instruct --workers 1 -- --precision bf16
"""
)
@click.option(
    "--model", default="default", show_default=True, help="Folder, .gguf file, hub id, 'default', 'simulated'."
)
@click.option("--port", default=8000, show_default=True, type=click.IntRange(1, 65535))
@click.option("--admin-port", default=8001, show_default=True, type=click.IntRange(1, 65535))
@click.option("--workers", default=2, show_default=True, type=click.IntRange(1, 64))
@click.option(
    "--state-dir",
    default=Path(".warmpath"),
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Keys, logs and connection.json.",
)
@click.argument("worker_args", nargs=-1, type=click.UNPROCESSED)
def up(model: str, port: int, admin_port: int, workers: int, state_dir: Path, worker_args: tuple[str, ...]) -> None:
    """Run a gateway and workers on this machine until Ctrl-C. WORKER_ARGS after -- go to each worker."""
    plan = Plan(model, port, admin_port, workers, state_dir.absolute(), worker_args)
    try:
        asyncio.run(_run(plan))
    except (OSError, KeyStoreError, SettingsError) as error:
        raise click.ClickException(f"cannot start: {error}") from error


async def _run(plan: Plan) -> None:
    if plan.port == plan.admin_port:
        raise click.ClickException(f"PORT and ADMIN_PORT are both {plan.port}; they must differ")
    for name, port in (("PORT", plan.port), ("ADMIN_PORT", plan.admin_port)):
        _require_free(name, port)
    connection = await _prepare_connection(plan)
    log_dir = plan.state_dir / "logs"
    log_dir.mkdir(exist_ok=True)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    children = Children(log_dir)
    serving = asyncio.create_task(_serve(plan, connection, children))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        else:
            _say("stopping")
    finally:
        serving.cancel()
        stopping.cancel()
        await asyncio.gather(serving, stopping, return_exceptions=True)  # after it no child can be added
        await children.stop()


async def _serve(plan: Plan, connection: Connection, children: Children) -> None:
    """Start everything, tell the user, and wait. Ends only by an exception or by cancellation."""
    await _fetch_model(plan.model)
    # No proxy of the environment: it knows nothing of this machine's loopback.
    async with _deaths_first(children), httpx.AsyncClient(timeout=_FIRST_ANSWER_S, trust_env=False) as http:
        await _start_gateway(plan, connection, children, http)
        await _start_workers(plan, connection, children, http)
        served = await _first_answer(connection, children, http)
    _tell(connection, served, children)
    dead = await children.wait_for_a_death()
    dead.require_alive()


async def _fetch_model(model: str) -> None:
    """Bring the model here, once for all workers. The child tells its progress and, in one line, its error."""
    if model == "simulated":
        return
    _say(f"model: {model}")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "workers", "fetch", model),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,  # not ours: what it says about being interrupted is for nobody
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )
    assert process.stderr is not None
    try:
        while said := await process.stderr.read(4096):
            sys.stderr.buffer.write(said)
            sys.stderr.buffer.flush()
        code = await process.wait()
    finally:
        await _end_fetch(process)
    if code < 0:
        raise click.ClickException(f"fetching the model ended with code {code}; MODEL=simulated runs without one")
    if code > 0:
        raise click.exceptions.Exit(code)


async def _end_fetch(process: asyncio.subprocess.Process) -> None:
    """Interrupt it, so that it removes half a file and ends its downloader; kill both if it does not."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_CLEAN_UP_S):
            await process.communicate()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


async def _start_gateway(plan: Plan, connection: Connection, children: Children, http: httpx.AsyncClient) -> None:
    _say("gateway: starting")
    gateway = await children.start(
        "gateway",
        [
            *("gateway", "serve", "--host", _HOST, "--port", str(plan.port)),
            *("--admin-port", str(plan.admin_port), "--state-dir", str(plan.state_dir)),
        ],
    )
    async with _deadline(_GATEWAY_START_S, "the gateway did not start in time"):
        while True:
            gateway.require_alive()
            with contextlib.suppress(httpx.TransportError):
                if (await http.get(f"{connection.admin_url}/health")).is_success:
                    return
            await asyncio.sleep(_POLL_S)


async def _start_workers(plan: Plan, connection: Connection, children: Children, http: httpx.AsyncClient) -> None:
    threads = max(1, (os.cpu_count() or 1) // plan.workers)
    args = ["workers", plan.model, "--host", _HOST, "--gateway", connection.admin_url]
    if plan.model != "simulated":
        args += ["--threads", str(threads)]
    for number in range(plan.workers):
        name = f"worker-{number}"
        await children.start(
            name, [*args, "--replica-id", name, *plan.worker_args], {"WARMPATH_JOIN_TOKEN": connection.join_token}
        )
    shown = -1
    async with _deadline(_WORKERS_START_S, "the workers did not get ready in time"):
        while shown < plan.workers:
            children.require_alive()
            ready = await _count_ready(connection, http)
            if ready != shown:
                _say(f"workers: {ready} of {plan.workers} ready")
                shown = ready
            await asyncio.sleep(_POLL_S)


async def _count_ready(connection: Connection, http: httpx.AsyncClient) -> int:
    answer = await http.get(f"{connection.admin_url}/admin/v1/replicas", headers=_bearer(connection.admin_key))
    answer.raise_for_status()
    return sum(replica["healthy"] for replica in answer.json()["replicas"])


async def _first_answer(connection: Connection, children: Children, http: httpx.AsyncClient) -> str:
    """Proof that the whole way works, before anyone is told so. Returns the model's name."""
    headers = _bearer(connection.api_key)
    models = await http.get(f"{connection.base_url}/models", headers=headers)
    model: str = models.raise_for_status().json()["data"][0]["id"]
    answer = await http.post(
        f"{connection.base_url}/completions",
        headers=headers,
        json={"model": model, "prompt": "Hello", "max_tokens": 1},
    )
    if not answer.is_success:
        children.require_alive()
        raise click.ClickException(f"the first answer failed: {answer.text}")
    return model


def _tell(connection: Connection, model: str, children: Children) -> None:
    click.echo(
        f"ready: base_url={connection.base_url} api_key={connection.api_key} "
        f"admin_url={connection.admin_url} admin_key={connection.admin_key}"
    )
    click.echo(
        f"""
  curl -N {connection.base_url}/chat/completions \\
    -H 'authorization: Bearer {connection.api_key}' -H 'content-type: application/json' \\
    -d '{{"model": "{model}", "stream": true, "temperature": 0,
         "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'
"""
    )
    for child in children.running:
        for line in child.log_lines():
            if line.startswith("running "):
                click.echo(f"  {child.name}: {line}")
    click.echo(f"  live table: {_command()} replicas --watch      end: Ctrl-C")


def _command() -> str:
    """What to type for `warmpath`: its name, or where it is if that is not on the PATH."""
    return "warmpath" if shutil.which("warmpath") else os.path.relpath(Path(sys.executable).with_name("warmpath"))


async def _prepare_connection(plan: Plan) -> Connection:
    """The keys of the last start if they still open this store, else new ones."""
    store = await open_key_store(load_settings(flags={"state_dir": plan.state_dir}))
    last: dict[str, str] = {}
    with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
        last = msgspec.json.decode(plan.connection_path.read_bytes(), type=dict[str, str])

    async def key(kind: KeyKind, name: str) -> str:
        known = last.get(name, "")
        now = time.time()
        if store.ring.verify(f"Bearer {known}".encode(), kind, now):
            return known
        lost = [record.id for record in store.ring.usable(kind, now) if (record.tenant, record.name) == ("up", "up")]
        making = store.rotate(lost[-1], 0.0) if lost else store.create(kind, name="up", tenant="up", debug=True)
        return (await making)[1]

    try:
        connection = Connection(
            base_url=f"http://{_HOST}:{plan.port}/v1",
            api_key=await key("client", "api_key"),
            admin_url=f"http://{_HOST}:{plan.admin_port}",
            admin_key=await key("admin", "admin_key"),
            join_token=await key("join", "join_token"),
        )
    finally:
        await store.aclose()
    descriptor = os.open(plan.connection_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(connection))
    return connection


def _require_free(name: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError as error:
            why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
            other = port + 10 if port < 65000 else port - 10
            raise click.ClickException(f"port {port} {why}; choose another with {name}={other}") from error


@contextlib.asynccontextmanager
async def _deaths_first(children: Children) -> AsyncIterator[None]:
    """A broken connection is told as what it comes from: the death of a child, where there is one."""
    try:
        yield
    except httpx.HTTPError as error:
        await asyncio.sleep(_POLL_S)  # the connection breaks a moment before the death is seen
        children.require_alive()
        raise click.ClickException(f"the gateway does not answer: {str(error) or type(error).__name__}") from error


@contextlib.asynccontextmanager
async def _deadline(seconds: float, message: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise click.ClickException(message) from error


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def _say(line: str) -> None:
    click.echo(line, err=True)
