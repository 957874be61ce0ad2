"""An engine process over the fake runner; the name of the model says how it behaves."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence

from tests.workers.fake_runner import FakeRunner, make_info
from workers.engine import Engine
from workers.engine_process import EngineArgs, main
from workers.step import RowResult, ScheduledSeq

SLOW_STEP_S = 0.005


def make_args(model: str = "fake") -> EngineArgs:
    return EngineArgs(model_path="", model=model, precision="fp32", threads=1, kv_bytes=0, max_num_seqs=8, block_size=4)


def build(args: EngineArgs) -> Engine:
    if args.model == "cannot start":
        raise ValueError("the model file\nis broken")
    if args.model == "dies at start":
        os._exit(3)
    if args.model == "hangs at start":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    return Engine(BehavingRunner(args.model))


class BehavingRunner(FakeRunner):
    def __init__(self, behaviour: str) -> None:
        super().__init__(make_info())
        self._behaviour = behaviour

    def step(self, batch: Sequence[ScheduledSeq]) -> list[RowResult]:
        if self._behaviour == "slow":
            time.sleep(SLOW_STEP_S)
        if self._behaviour == "fails":
            self.num_failures_to_come = 1
        if self._behaviour == "hangs":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(60)
        return super().step(batch)


if __name__ == "__main__":
    sys.exit(main(build=build))
