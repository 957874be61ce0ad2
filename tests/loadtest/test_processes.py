import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from loadtest.processes import SystemFailure, running_process
from tests.system.processes import alive, descendants, wait_until

PARENT = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
BUSY = "import time\nwhile time.process_time() < 0.3: pass\nopen({done!r}, 'w').close()\ntime.sleep(60)"


def test_what_a_process_started_counts_as_its_own_and_ends_with_it(tmp_path: Path) -> None:
    done = tmp_path / "done"
    command = [sys.executable, "-c", PARENT.format(child=BUSY.format(done=str(done)))]

    with running_process(command, tmp_path / "log") as process:
        wait_until(done.exists, 20, "the child has worked")
        family = {process.pid, *descendants(process.pid)}
        used = process.usage()

    assert len(family) == 2
    assert used.cpu_s > 0.3
    wait_until(lambda: not any(map(alive, family)), 5, "both have ended")


def test_one_that_does_not_listen_is_made_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.processes._STOP_S", 0.2)
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )

    with running_process([sys.executable, "-c", deaf], tmp_path / "log") as process:
        wait_until(lambda: "deaf" in (tmp_path / "log").read_text(), 20, "it ignores the signal")
        began = time.monotonic()

    assert time.monotonic() - began < 5
    assert not alive(process.pid)


def test_an_early_end_is_told_with_the_end_of_the_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no such flag'); raise SystemExit(3)"]

    with running_process(command, tmp_path / "log") as process:
        wait_until(lambda: not alive(process.pid), 20, "it has ended")

        with pytest.raises(SystemFailure, match=r"ended early with 3.*\n.*no such flag"):
            process.check()


def test_a_program_that_is_not_there_is_told_by_name(tmp_path: Path) -> None:
    with (
        pytest.raises(SystemFailure, match=r"cannot start no-such-router: No such file"),
        running_process(["no-such-router"], tmp_path / "log"),
    ):
        pass


def test_a_signal_in_the_middle_of_a_start_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            started.append(self.pid)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("subprocess.Popen", Interrupted)
    usual = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with pytest.raises(SystemExit), running_process([sys.executable, "-c", "input()"], tmp_path / "log"):
            pytest.fail("it was told to end before")
    finally:
        signal.signal(signal.SIGTERM, usual)

    (pid,) = started
    assert not alive(pid)
