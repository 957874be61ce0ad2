"""What `warmpath bench fleet` says of mistakes, before it starts anything."""

import pytest
from click.testing import CliRunner

from loadtest.fleet import fleet


@pytest.mark.parametrize(
    ("args", "fault"),
    [
        (["--policies", "best"], "'best' is none of"),
        (["--policies", "none"], "nothing to measure"),
        (["--knowledge", "vague"], "'vague' is none of exact, plain"),
        (["--peer", "x=router"], "the command has no {port}"),
        (["--peer", "x=a {port} {workers}", "--peer", "x=b {port} {workers}"], "the same name"),
        (["--workload", "shared", "--limit", "10"], "nothing but warming up"),
        (["--rates", "0"], "above 0"),
        (["--rates", "20,fast"], "no list of numbers"),
    ],
)
def test_a_mistake_is_a_usage_error(args: list[str], fault: str) -> None:
    asked = CliRunner().invoke(fleet, args)

    assert (asked.exit_code, fault in asked.output) == (2, True), asked.output


def test_a_trace_that_is_not_there_is_told_with_what_brings_it(tmp_path: object) -> None:
    asked = CliRunner().invoke(fleet, ["--trace", f"{tmp_path}/none.jsonl"])

    assert asked.exit_code == 1
    assert "none.jsonl: No such file or directory; `warmpath bench data` brings" in asked.output
