"""The part of the command line that only simulated replicas have, and what it builds: runners, engines, faults."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import click

from router.blocks import BLOCK_SIZE
from workers.client import InProcessEngineClient
from workers.faults import KINDS, Fault, parse_fault
from workers.faulty import FaultyReplica
from workers.presets import PRESETS, Preset
from workers.protocol import EngineInfo
from workers.server import ReplicaApp
from workers.simulated import SimulatedRunner, TimeModel, engine_over, simulated_info

__all__ = ["SimulatedOptions", "SimulatedReplica", "simulated_options"]

KV_BYTES_PER_TOKEN: Final = 128 << 10
"""What a token of an 8-billion model with grouped queries takes in bf16; it only gives --kv-memory a meaning."""

_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedOptions:
    """None where the preset, or one replica at its own pace, is meant."""

    replicas: int | None
    preset: str | None
    prefill_ms: float | None
    prefill_token_ms: float | None
    decode_ms: float | None
    decode_free: int | None
    decode_row: float | None
    speedup: float | None
    jitter: float | None
    seed: int | None
    kv_tokens: int | None
    tokens_per_chunk: int | None
    fault: tuple[Fault, ...]

    def __post_init__(self) -> None:
        for name, number in dataclasses.asdict(self).items():
            if isinstance(number, float) and not math.isfinite(number):
                raise click.UsageError(f"{_flag(name)} takes a finite number")
        for fault in self.fault:
            if fault.replica is not None and fault.replica >= self.num_replicas:
                raise click.UsageError(f"--fault names replica {fault.replica}; there are {self.num_replicas}, from 0")

    @property
    def given(self) -> list[str]:
        """The flags that were set."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return [_flag(name) for name, value in values.items() if value not in (None, ())]

    @property
    def num_replicas(self) -> int:
        return self.replicas or 1

    @property
    def _preset(self) -> Preset:
        return PRESETS[self.preset or "default"]

    def time_model(self) -> TimeModel:
        given = {
            "prefill_s": _seconds(self.prefill_ms),
            "prefill_token_s": _seconds(self.prefill_token_ms),
            "decode_s": _seconds(self.decode_ms),
            "free_rows": self.decode_free,
            "decode_row": self.decode_row,
            "speedup": self.speedup,
            "jitter": self.jitter,
        }
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return dataclasses.replace(self._preset.time_model, **changes)

    def info(
        self,
        *,
        model: str,
        kv_memory: int | None,
        max_num_seqs: int | None,
        max_model_len: int | None,
        patience: float = 0.0,
        takes_priority: bool = False,
    ) -> EngineInfo:
        if self.kv_tokens is not None and kv_memory is not None:
            raise click.UsageError("--kv-tokens and --kv-memory say the same in two units; give one")
        kv_tokens = self.kv_tokens or self._preset.kv_tokens
        if kv_memory is not None:
            kv_tokens = kv_memory // KV_BYTES_PER_TOKEN
        if kv_tokens < BLOCK_SIZE:
            raise click.UsageError(f"--kv-memory holds no block of {BLOCK_SIZE * KV_BYTES_PER_TOKEN} bytes")
        sizes = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len}
        return simulated_info(
            model=model,
            kv_tokens=kv_tokens,
            patience=patience,
            takes_priority=takes_priority,
            **{name: size for name, size in sizes.items() if size is not None},
        )

    def build(self, info: EngineInfo, number: int) -> SimulatedReplica:
        seed = (self.seed or 0) + number
        runner = SimulatedRunner(info, self.time_model(), seed=seed)
        engine = engine_over(runner, token_budget=self._preset.token_budget)
        engine.warm_up()
        return SimulatedReplica(
            runner=runner,
            client=InProcessEngineClient(engine, tokens_per_chunk=self.tokens_per_chunk or 1),
            faults=tuple(fault for fault in self.fault if fault.replica in (None, number)),
            seed=seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedReplica:
    """What one of them is made of, behind its server."""

    runner: SimulatedRunner
    client: InProcessEngineClient
    faults: tuple[Fault, ...]
    seed: int

    def with_faults(self, app: ReplicaApp, credential: str) -> FaultyReplica:
        return FaultyReplica(app, self.runner, faults=self.faults, credential=credential, seed=self.seed)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000


def _parse_faults(context: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> tuple[Fault, ...]:
    try:
        return tuple(parse_fault(text) for text in texts)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


_TIME: Final = click.FloatRange(0, 1e6)

_OPTIONS: Final = (
    click.option(
        "--replicas", type=click.IntRange(1, 256), help="To run in this process, each with its own port and cache.  [1]"
    ),
    click.option(
        "--preset",
        type=click.Choice(list(PRESETS)),
        help="; ".join(f"{name}: {preset.about}" for name, preset in PRESETS.items()) + ".",
    ),
    click.option("--prefill-ms", type=_TIME, help="What a prompt takes, besides its tokens."),
    click.option("--prefill-token-ms", type=_TIME, help="What a prompt token takes that was not cached."),
    click.option("--decode-ms", type=click.FloatRange(0, 1e6, min_open=True), help="What a step of decoding takes,"),
    click.option("--decode-free", type=click.IntRange(0), help="for up to so many sequences;"),
    click.option("--decode-row", type=click.FloatRange(0, 1e3), help="each further one adds this part of it."),
    click.option("--speedup", type=click.FloatRange(0, min_open=True), help="All of this runs faster.  [1]"),
    click.option("--jitter", type=click.FloatRange(0, 0.99), help="Each step takes up to this part less or more.  [0]"),
    click.option("--seed", type=click.IntRange(0, 2**32), help="Of jitter and of faults that come by share.  [0]"),
    click.option("--kv-tokens", type=click.IntRange(BLOCK_SIZE), help="Room for KV, in tokens.  [the preset's]"),
    click.option(
        "--tokens-per-chunk",
        type=click.IntRange(1),
        help="After the first token: fewer, longer events cost less CPU.  [1]",
    ),
    click.option(
        "--fault",
        multiple=True,
        metavar="FAULT",
        callback=_parse_faults,
        help="[REPLICA/]KIND[=VALUE][:WHEN][@PATH], as 503=2:25%, hang:3 or 1/die-after=5; may be repeated. Kinds: "
        + "; ".join(f"{name}: {kind.about}" for name, kind in KINDS.items())
        + ". PUT /simulate/faults changes them.",
    ),
)


def simulated_options(command: _Command) -> _Command:
    """Adds the options; their names are the fields of `SimulatedOptions`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
