from pathlib import Path

from loadtest.plots import draw_plots
from loadtest.summary import Run
from tests.loadtest.runs import answer, report_of, run_of, sample


def drawn(folder: Path, runs: list[Run]) -> list[bytes]:
    return [path.read_bytes() for path in draw_plots(report_of(runs), folder)]


def test_two_pictures_show_what_the_runs_were(tmp_path: Path) -> None:
    quick = run_of([answer(0.1)], samples=[sample(0, inflight=3), sample(0, at_s=6.0, inflight=4)])
    slow = run_of([answer(1.1)], arm="random", samples=[sample(0, inflight=30), sample(0, at_s=6.0, inflight=40)])

    one, both = drawn(tmp_path / "one", [quick]), drawn(tmp_path / "both", [quick, slow])

    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["trace-1x-load.png", "trace-1x-ttft.png"]
    assert all(picture.startswith(b"\x89PNG") for picture in one + both)
    assert all(few != more for few, more in zip(one, both, strict=True))


def test_a_run_in_which_nothing_was_answered_can_be_drawn(tmp_path: Path) -> None:
    assert drawn(tmp_path, [run_of([answer(error="503")], samples=[])])
