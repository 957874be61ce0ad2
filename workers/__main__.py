"""``python -m workers MODEL``: a replica, or several simulated ones in this process, from the command line to the end.
``python -m workers fetch MODEL``: bring a model to this machine.

The one place that builds a replica's objects, and the only reader of its environment. What only a real model needs is
imported where it is used: a simulated replica starts in half a second, without torch, gguf and numpy.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import click
import uvloop

from router.blocks import BLOCK_SIZE
from router.prompt import TokenizerError, TokenizerFiles, load_prompter
from router.wire import ReplicaSpec
from workers.client import EngineClient, EngineDead, ProcessEngineClient
from workers.engine_process import EngineArgs
from workers.hub import LocalModel, cache_dir, resolve
from workers.lifecycle import ServedApp, bind, is_loopback, reachable_url, serve, stop_signals
from workers.model_config import read_config
from workers.model_errors import ModelDamaged, ModelError
from workers.protocol import EngineInfo
from workers.register import Registration
from workers.server import ReplicaApp
from workers.simulated_options import SimulatedOptions, simulated_options
from workers.tracing import Tracer, otlp_tracer

__all__ = ["main"]

SIMULATED: Final = "simulated"

DEFAULT_KV_BYTES: Final = 512 << 20
DEFAULT_NUM_SEQS: Final = 64
"""On a CPU: more at once make everybody slower and nobody faster."""
ENCODER_THREADS: Final = 2
"""Long prompts that come without ids are tokenized here, beside the event loop."""


_UNITS: Final = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_size(text: str) -> int:
    """``512MiB``, ``2GB`` or plain bytes → bytes."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,6})?) ?([A-Za-z]{0,3})", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise click.BadParameter(f"{text!r} is no size; write 512MiB or 2GiB")
    return int(float(match[1]) * unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line, checked."""

    model: str
    host: str
    port: int
    served_model_name: str | None
    precision: Literal["auto", "int8", "bf16", "fp32"]
    kv_memory: int | None
    max_model_len: int | None
    max_num_seqs: int | None
    patience: float
    scheduling_policy: Literal["fcfs", "priority"]
    threads: int
    gateway: tuple[str, ...]
    join_token: str
    replica_id: str | None
    credential: str
    advertise: str | None
    grace: float
    cache: Path
    plan_only: bool
    otlp_traces_endpoint: str | None
    simulated: SimulatedOptions

    def __post_init__(self) -> None:
        for url in (*self.gateway, *([self.advertise] if self.advertise else [])):
            if not _is_base_url(url):
                raise click.UsageError(f"{url!r} is no URL; write http://host:port")
        if self.otlp_traces_endpoint is not None and not self.otlp_traces_endpoint.startswith(("http://", "https://")):
            raise click.UsageError("--otlp-traces-endpoint takes a URL; write http://host:4318/v1/traces")
        if self.gateway and not self.join_token:
            raise click.UsageError("--gateway needs --join-token (or WARMPATH_JOIN_TOKEN)")
        secrets_given = [("--credential", self.credential)]
        if self.gateway:
            secrets_given.append(("--join-token", self.join_token))
        for name, secret in secrets_given:
            if not re.fullmatch(r"[\x21-\x7e]{1,512}", secret):
                raise click.UsageError(f"{name} takes 1 to 512 printable characters without spaces")
        if self.replica_id is not None and not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", self.replica_id):
            raise click.UsageError("--replica-id takes 1 to 63 characters of a-z, 0-9 and -, with no - at its ends")
        if not math.isfinite(self.grace):
            raise click.UsageError("--grace takes a finite number")
        if self.model != SIMULATED and self.simulated.given:
            raise click.UsageError(f"{self.simulated.given[0]} is for simulated replicas")
        if self.replicas > 1:
            self._check_several()

    @property
    def replicas(self) -> int:
        return self.simulated.num_replicas

    def _check_several(self) -> None:
        if self.advertise:
            raise click.UsageError("--advertise is the URL of one replica, not of several")
        if self.port and self.port + self.replicas - 1 > 65535:
            raise click.UsageError(f"--port {self.port} leaves no ports for {self.replicas} replicas")


def _is_base_url(url: str) -> bool:
    """Whether it is scheme, host and perhaps a port, and nothing that would change what is asked for."""
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and not (parts.path.strip("/") or parts.query or parts.fragment or parts.username)
        )
    except ValueError:
        return False


_cache_option = click.option(
    "--cache",
    envvar="WARMPATH_CACHE",
    show_envvar=True,
    type=click.Path(file_okay=False, path_type=Path),
    default=lambda: cache_dir(os.environ),
    help="Where models are kept.  [default: ~/.cache/warmpath/models]",
)


class _ServeCommand(click.Command):
    """Help with a section of its own for what only simulated replicas take."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": [], "Options of simulated replicas": []}
        names = {each.name for each in fields(SimulatedOptions)}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)):
                sections["Options of simulated replicas" if param.name in names else "Options"].append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


@click.command(
    cls=_ServeCommand,
    epilog="""\b
Examples:
  python -m workers simulated --port 8101
  python -m workers simulated --replicas 8 --port 8101 --gateway http://127.0.0.1:8001 --join-token wpj-…
  python -m workers simulated --preset h100-8b --jitter 0.1 --fault 503=2:5% --fault 0/hang-after=3:*/20
  python -m workers default --gateway http://127.0.0.1:8001 --join-token wpj-…
  python -m workers ./Qwen2.5-0.5B-Instruct --precision bf16 --kv-memory 1GiB
  python -m workers ./model.gguf --plan-only
  python -m workers fetch default
""",
)
@click.argument("model")
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Elsewhere than on loopback only gateways are served."
)
@click.option(
    "--port",
    default=0,
    type=click.IntRange(0, 65535),
    help="0 takes a free one; several replicas take this one and those after it.  [default: 0]",
)
@click.option("--served-model-name", help="What clients call the model.  [default: the model's own name]")
@click.option("--precision", type=click.Choice(["auto", "int8", "bf16", "fp32"]), default="auto", show_default=True)
@click.option("--kv-memory", type=parse_size, metavar="SIZE", help="For the KV cache, as 512MiB.  [default: 512MiB]")
@click.option(
    "--max-model-len", type=click.IntRange(min=2), help="Tokens of prompt and answer.  [default: the model's]"
)
@click.option("--max-num-seqs", type=click.IntRange(min=1), help="Sequences that run at once.")
@click.option(
    "--patience",
    type=click.FloatRange(0, 100),
    default=0.0,
    show_default=True,
    help="Times what its own prefill takes, a prompt lets shorter ones pass; 0 is first come, first served. Gateways say it "
    "with each request.",
)
@click.option(
    "--scheduling-policy",
    type=click.Choice(["fcfs", "priority"]),
    default="fcfs",
    show_default=True,
    help="priority: the body's field 'priority' counts, the least first, where no gateway says more.",
)
@click.option("--threads", type=click.IntRange(min=1), default=os.cpu_count() or 1, show_default=True)
@click.option("--gateway", multiple=True, help="Admin URL of a gateway to register with; may be repeated.")
@click.option(
    "--join-token", default="", envvar="WARMPATH_JOIN_TOKEN", show_envvar=True, help="Lets the replica register."
)
@click.option(
    "--replica-id", help="Its name at the gateways; several get a number each.  [default: from host name and port]"
)
@click.option(
    "--credential",
    envvar="WARMPATH_CREDENTIAL",
    show_envvar=True,
    default=lambda: secrets.token_urlsafe(32),
    help="What gateways must show.  [default: random]",
)
@click.option("--advertise", help="URL under which gateways reach it.  [default: where it listens]")
@click.option(
    "--grace", type=click.FloatRange(0, 600), default=2.0, show_default=True, help="Seconds for answers at the end."
)
@_cache_option
@click.option(
    "--otlp-traces-endpoint",
    envvar="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    show_envvar=True,
    metavar="URL",
    help="Where spans are sent (OTLP over HTTP), as http://host:4318/v1/traces, of requests whose sender records them.",
)
@click.option("--plan-only", is_flag=True, help="Say what memory it would take, and end.")
@simulated_options
def _serve_command(**values: Any) -> None:
    """Run a replica of MODEL: a folder, a .gguf file, a hub id, 'default' or 'simulated'."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname).1s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it tells every heartbeat
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    simulated = SimulatedOptions(**{each.name: values.pop(each.name) for each in fields(SimulatedOptions)})
    options = Options(**values, simulated=simulated)
    try:
        if options.plan_only:
            click.echo(_plan(options))
            return
        kit = _simulated(options) if options.model == SIMULATED else _torch(options)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            alive = runner.run(_run(options, kit))
    except (ModelError, TokenizerError, EngineDead) as error:
        raise click.ClickException(str(error)) from error
    if not alive:
        raise click.ClickException("the engine has ended")


@click.command("fetch")
@click.argument("model")
@_cache_option
def _fetch_command(model: str, cache: Path) -> None:
    """Bring MODEL to this machine, telling its progress on stderr, and print its path."""
    try:
        click.echo(_resolve(model, cache).path)
    except ModelError as error:
        raise click.ClickException(str(error)) from error


def main() -> None:
    """`fetch` is a word in the place of MODEL; a folder of that name is written ./fetch."""
    if sys.argv[1:2] == ["fetch"]:
        _fetch_command(sys.argv[2:], prog_name="python -m workers fetch")
    else:
        _serve_command(prog_name="python -m workers")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kit:
    """What the two kinds of replica differ in."""

    engines: Sequence[EngineClient]
    files: TokenizerFiles
    finish: Callable[[int, ReplicaApp], ServedApp] = lambda number, app: app
    """Makes of a replica's app what is served."""


async def _run(options: Options, kit: _Kit) -> bool:
    """One replica for each engine. False when an engine died; then the others end too."""
    engines, files = kit.engines, kit.files
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(_bind(options, number)) for number in range(len(engines))]
        stop = stack.enter_context(stop_signals())
        executor = stack.enter_context(ThreadPoolExecutor(ENCODER_THREADS))
        tracer = _tracer(options)
        try:
            infos = await _start(engines, stop)
            if infos is None:
                return True
            # Its gateway sends ids, so a worker seldom tokenizes: what that would save is less than a longer start costs.
            load = partial(load_prompter, files, native=False)
            prompter = await asyncio.get_running_loop().run_in_executor(executor, load)
            if prompter.max_id >= infos[0].vocab_size:
                raise ModelDamaged(
                    f"the tokenizer has ids up to {prompter.max_id}, the model's embedding ends at "
                    f"{infos[0].vocab_size - 1}: they do not belong together"
                )
            apps = [
                ReplicaApp(
                    engine=engine,
                    info=info,
                    files=files,
                    prompter=prompter,
                    executor=executor,
                    credential=options.credential,
                    on_loopback=is_loopback(sock),
                    tracer=tracer,
                )
                for engine, info, sock in zip(engines, infos, socks, strict=True)
            ]
            for sock in socks:
                sock.listen()  # from here on nobody is refused: who comes before the server does waits for it
            click.echo(_describe(infos[0]))
            for sock in socks:
                click.echo(f"listening on {reachable_url(sock)}")
            served = [kit.finish(number, app) for number, app in enumerate(apps)]
            async with asyncio.TaskGroup() as group:
                serving = [
                    group.create_task(_serve(options, number, app, infos[number], engines[number], socks[number], stop))
                    for number, app in enumerate(served)
                ]
            return all(task.result() for task in serving)
        finally:
            for engine in engines:
                await engine.stop()
            if tracer is not None:
                await asyncio.to_thread(tracer.close)


def _tracer(options: Options) -> Tracer | None:
    if options.otlp_traces_endpoint is None:
        return None
    return otlp_tracer(options.otlp_traces_endpoint, unix_offset=lambda: time.time() - time.monotonic())


async def _serve(
    options: Options,
    number: int,
    app: ServedApp,
    info: EngineInfo,
    engine: EngineClient,
    sock: socket.socket,
    stop: asyncio.Event,
) -> bool:
    """One replica until its end, which is that of all in this process. False when its engine died."""
    spec = ReplicaSpec(
        url=options.advertise or reachable_url(sock),
        model=info.model,
        revision=info.revision,
        epoch=app.epoch,
        credential=options.credential,
    )
    named = options.replica_id
    replica_id = _replica_id(sock) if named is None else named if options.replicas == 1 else f"{named}-{number}"
    registrations = [
        Registration(gateway=gateway, replica_id=replica_id, spec=spec, join_token=options.join_token)
        for gateway in options.gateway
    ]
    try:
        return await serve(app, engine, sock, stop=stop, registrations=registrations, grace_s=options.grace)
    finally:
        stop.set()


def _bind(options: Options, number: int) -> socket.socket:
    port = options.port and options.port + number
    try:
        return bind(options.host, port)
    except OSError as error:
        raise click.ClickException(f"cannot listen on {options.host}:{port}: {error.strerror}") from error


async def _start(engines: Sequence[EngineClient], stop: asyncio.Event) -> list[EngineInfo] | None:
    """None when told to stop before the engines were ready."""
    starting = asyncio.ensure_future(asyncio.gather(*(engine.start() for engine in engines)))
    stopping = asyncio.create_task(stop.wait())
    both: list[asyncio.Future[Any]] = [starting, stopping]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        return starting.result() if starting.done() else None
    finally:
        for future in both:
            future.cancel()
        await asyncio.wait(both)


def _replica_id(sock: socket.socket) -> str:
    """Unique on this machine, in the form that gateways take: letters, digits and '-', at most 63."""
    host = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower()).strip("-")[:50].strip("-")
    return f"{host or 'replica'}-{sock.getsockname()[1]}"


# --- the two kinds of engine -----------------------------------------------------------------------------------------


def _simulated(options: Options) -> _Kit:
    simulated = options.simulated
    info = simulated.info(
        model=options.served_model_name or SIMULATED,
        kv_memory=options.kv_memory,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        patience=options.patience,
        takes_priority=options.scheduling_policy == "priority",
    )
    replicas = [simulated.build(info, number) for number in range(options.replicas)]
    return _Kit(
        engines=[replica.client for replica in replicas],
        files=TokenizerFiles(kind="trivial"),
        finish=lambda number, app: replicas[number].with_faults(app, options.credential),
    )


def _torch(options: Options) -> _Kit:
    from workers.tokenizer_files import load_tokenizer_files

    local = _resolve(options.model, options.cache)
    args = EngineArgs(
        model_path=str(local.path),
        model=options.served_model_name or local.name,
        revision=local.revision,
        precision=options.precision,
        threads=options.threads,
        kv_bytes=options.kv_memory or DEFAULT_KV_BYTES,
        max_num_seqs=options.max_num_seqs or DEFAULT_NUM_SEQS,
        max_model_len=options.max_model_len,
        block_size=BLOCK_SIZE,
        patience=options.patience,
        takes_priority=options.scheduling_policy == "priority",
    )
    return _Kit(engines=[ProcessEngineClient(args)], files=load_tokenizer_files(local.path))


def _resolve(model: str, cache: Path) -> LocalModel:
    return resolve(model, cache, lambda line: click.echo(line, err=True))


def _describe(info: EngineInfo) -> str:
    """What runs, in a line; `warmpath up` shows it."""
    kv_tokens = info.num_blocks * info.block_size
    room = f"{kv_tokens:,} tokens, at most {info.max_num_seqs} sequences at once"
    if info.precision == "simulated":
        return f"running {info.model}: made-up text at a realistic pace, KV memory for {room}"
    kv_mib = kv_tokens * info.kv_bytes_per_token / (1 << 20)
    return (
        f"running {info.model} in {info.precision}: {info.weights_bytes / (1 << 20):,.0f} MiB of weights, "
        f"{kv_mib:,.0f} MiB of KV memory for {room}"
    )


def _plan(options: Options) -> str:
    """What memory the model would take, for people."""
    if options.model == SIMULATED:
        return "a simulated replica takes no memory for weights or KV cache"
    from workers.plan import plan_memory

    try:
        from workers.quant import choose_precision, supports_bf16  # torch knows what the CPU can do

        plan = plan_memory(
            read_config(_resolve(options.model, options.cache).path),
            choose_precision(options.precision),
            kv_bytes=options.kv_memory or DEFAULT_KV_BYTES,
            block_size=BLOCK_SIZE,
            max_model_len=options.max_model_len,
            kv_fp32=not supports_bf16(),
        )
    except ModuleNotFoundError as error:
        raise click.ClickException(f"a model needs {error.name}: install warmpath[engine]") from error
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    return plan.describe()


if __name__ == "__main__":
    main()
