import gzip
from importlib.resources import files
from pathlib import Path

import pytest
from click.testing import CliRunner

from loadtest.trace import TraceUnreadable, data, read_trace, whole_trace_path

ROW = b'{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]}\n'


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_trace_may_be_packed(tmp_path: Path, pack: object) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(pack(ROW * 2))  # type: ignore[operator]

    assert [row.hash_ids for row in read_trace(path)] == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (ROW + b"{}\n", "line 2: Object missing required field"),
        (ROW.replace(b"600", b"-6"), "line 1: Expected `int` >= 1"),
        (b"\x1f\x8b no gzip", "trace.jsonl: "),
    ],
)
def test_what_is_no_trace_is_refused_with_its_place(tmp_path: Path, content: bytes, fault: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)

    with pytest.raises(TraceUnreadable, match=fault):
        list(read_trace(path))


def test_the_whole_trace_is_taken_from_where_one_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = gzip.decompress((files("loadtest") / "data" / "mooncake_conversation_1000.jsonl.gz").read_bytes())
    (tmp_path / "whole.jsonl").write_bytes(first + ROW)

    asked = CliRunner().invoke(data, ["--from", str(tmp_path / "whole.jsonl")])

    assert asked.exit_code == 0, asked.output
    assert len(list(read_trace(whole_trace_path()))) == 1001
    assert "1001 requests, where the published trace has 12031" in asked.output


def test_another_trace_is_not_taken_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "other.jsonl").write_bytes(ROW * 1000)

    asked = CliRunner().invoke(data, ["--from", str(tmp_path / "other.jsonl")])

    assert (asked.exit_code, "not Mooncake's conversation trace" in asked.output) == (1, True)
    assert not whole_trace_path().exists()


def test_without_a_network_it_says_so_in_one_line() -> None:
    asked = CliRunner().invoke(data, ["--from", "http://127.0.0.1:1/trace.jsonl"])

    assert asked.exit_code == 1
    assert asked.output.startswith("Error: http://127.0.0.1:1/trace.jsonl: ")
    assert asked.output.count("\n") == 1
