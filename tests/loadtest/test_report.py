from pathlib import Path

import pytest
from click.testing import CliRunner

from loadtest.compare import ReportUnreadable, read_report, write_report
from loadtest.report import markdown, report
from tests.loadtest.runs import answer, report_of, run_of, sample, timed_run


def test_a_report_is_read_as_it_was_written_and_keeps_rows_of_numbers_in_one_line(tmp_path: Path) -> None:
    made = report_of([run_of([answer()], samples=[sample(0, inflight=3), sample(0, inflight=4)])])

    write_report(made, tmp_path / "report.json")

    assert read_report(tmp_path / "report.json") == made
    assert "[[[10.0,3],[10.0,4]]]" in (tmp_path / "report.json").read_text()


def test_tables_tell_targets_then_runs() -> None:
    runs = [timed_run("cost", 40, 100), timed_run("a", 100, 1200, invalid="client 200 ms late")]

    text = markdown([report_of(runs, peers=("a",))])

    assert "| trace 1×: TTFT p50 over best peer's (a) | exact | 0.4 | ≤ 0.45 | yes, from an invalid run |" in text
    assert "| `a` (invalid) |" in text
    assert "100 / 1,200 / 1,200" in text
    assert text.endswith("Invalid: `a` (client 200 ms late).\n")


def test_the_two_orders_of_replicas_are_judged_apart() -> None:
    """A router's times over one order say nothing against a peer's over the other."""
    first_come = report_of([timed_run("cost", 90, 100), timed_run("a", 100, 200)], peers=("a",), order="arrival")
    short_first = report_of([timed_run("cost", 30, 60), timed_run("a", 100, 200)], peers=("a",))

    text = markdown([first_come, short_first])

    assert text.index("Replicas compute first come, first served.") < text.index(
        "(a) | exact | 0.9 | ≤ 0.45 | **no** |"
    )
    assert text.index("Replicas compute in the order they are asked for") < text.index(
        "(a) | exact | 0.3 | ≤ 0.45 | yes |"
    )
    assert first_come.setup.file_name != short_first.setup.file_name


def test_what_is_no_report_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text('{"commit": "x"}')

    with pytest.raises(ReportUnreadable, match=r"old\.json: no report"):
        read_report(tmp_path / "old.json")
    asked = CliRunner().invoke(report, [str(tmp_path / "none.json")])
    assert (asked.exit_code, "No such file" in asked.output) == (1, True)
