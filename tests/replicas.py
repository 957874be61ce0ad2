"""Real replicas for tests: an engine behind its server, on a port of its own, in this event loop or in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import httpx

from router.blocks import BLOCK_SIZE
from router.prompt import TokenizerFiles, load_prompter
from tests.default_model import default_model
from tests.serving import serving
from tests.tiny_replica_model import save_tiny_model
from workers.client import EngineClient, InProcessEngineClient, ProcessEngineClient
from workers.engine_process import EngineArgs
from workers.faulty import FaultyReplica
from workers.lifecycle import ServedApp
from workers.server import ReplicaApp
from workers.simulated import SimulatedRunner, TimeModel, engine_over, simulated_info
from workers.tokenizer_files import load_tokenizer_files
from workers.tracing import Tracer

CREDENTIAL = "replica-credential"

T = TypeVar("T")


@dataclass(frozen=True)
class Replica:
    base_url: str
    credential: str
    model: str
    max_model_len: int

    def client(self, *, credential: bool = True) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self.credential}"} if credential else {}
        return httpx.AsyncClient(base_url=self.base_url, headers=headers, timeout=30, trust_env=False)


def simulated_runner(*, speedup: float = 50.0, kv_tokens: int = 1 << 14) -> SimulatedRunner:
    return SimulatedRunner(simulated_info(kv_tokens=kv_tokens, max_model_len=2048), TimeModel(speedup=speedup))


def simulated_engine(*, speedup: float = 50.0, kv_tokens: int = 1 << 14) -> InProcessEngineClient:
    return InProcessEngineClient(engine_over(simulated_runner(speedup=speedup, kv_tokens=kv_tokens)))


@asynccontextmanager
async def running(
    engine: EngineClient,
    files: TokenizerFiles,
    *,
    port: int = 0,
    finish: Callable[[ReplicaApp], ServedApp] = lambda app: app,
    tracer: Tracer | None = None,
) -> AsyncIterator[Replica]:
    """An engine behind its server; `finish` makes of its app what is served."""
    info = await engine.start()
    try:
        with ThreadPoolExecutor(1) as executor:
            app = ReplicaApp(
                engine=engine,
                info=info,
                files=files,
                prompter=load_prompter(files),
                executor=executor,
                credential=CREDENTIAL,
                on_loopback=True,
                tracer=tracer,
            )
            async with serving(finish(app), port=port) as url:
                try:
                    yield Replica(url, CREDENTIAL, info.model, info.max_model_len)
                finally:
                    app.close_streams()
    finally:
        await engine.stop()


@contextmanager
def in_a_thread(start: Callable[[], AbstractAsyncContextManager[T]]) -> Iterator[T]:
    """Tests have an event loop each; what outlives them needs its own."""
    ready: Future[T] = Future()
    loop = asyncio.new_event_loop()
    done = asyncio.Event()

    async def run() -> None:
        try:
            async with start() as replica:
                ready.set_result(replica)
                await done.wait()
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    def run_loop() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(run())

    thread = threading.Thread(target=run_loop)
    thread.start()
    try:
        yield ready.result(timeout=120)
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()


def start_simulated() -> AbstractAsyncContextManager[Replica]:
    """As the command serves it: able to fail on request."""
    runner = simulated_runner()
    return running(
        InProcessEngineClient(engine_over(runner)),
        TokenizerFiles(kind="trivial"),
        finish=lambda app: FaultyReplica(app, runner, faults=(), credential=CREDENTIAL),
    )


def torch_engine(path: Path, *, max_model_len: int = 2048) -> EngineClient:
    """A process of its own."""
    return ProcessEngineClient(
        EngineArgs(
            model_path=str(path),
            model=path.stem,
            precision="auto",
            threads=1,
            kv_bytes=64 << 20,
            max_num_seqs=8,
            max_model_len=max_model_len,
            block_size=BLOCK_SIZE,
        )
    )


@asynccontextmanager
async def start_torch() -> AsyncIterator[Replica]:
    """A real engine over a tiny model. Skips the test where its tokenizer cannot be had."""
    with TemporaryDirectory() as name:
        path = Path(name) / "tiny"
        path.mkdir()
        save_tiny_model(path)
        async with running(torch_engine(path), load_tokenizer_files(path)) as replica:
            yield replica


def start_default_model() -> AbstractAsyncContextManager[Replica]:
    path = default_model()
    return running(torch_engine(path), load_tokenizer_files(path))
