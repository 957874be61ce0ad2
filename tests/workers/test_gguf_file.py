from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.workers.gguf_writing import write_gguf, write_metadata
from tests.workers.tiny_models import make_hf, weights_of
from workers.gguf_file import read_gguf
from workers.model_config import tensor_shapes
from workers.model_errors import ModelDamaged, ModelError, ModelNotFound, ModelUnsupported

VALUES: dict[str, Any] = {
    "a.text": "für ▁",
    "a.number": 7,
    "a.real": 0.5,
    "a.flag": True,
    "a.texts": ["", "x", "Ġdé"],
    "a.numbers": [1, -2, 3],
    "a.reals": [0.25, -1.5],
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write_metadata(path, VALUES)
    return path


def test_metadata_is_read_as_written(small: Path) -> None:
    found = read_gguf(small)

    assert {key: found.metadata[key] for key in VALUES} == VALUES
    assert found.tensors == {}


def test_tensors_are_where_the_reference_reader_finds_them(tmp_path: Path) -> None:
    weights = weights_of(make_hf())
    write_gguf(tmp_path / "model.gguf", weights, tensor_shapes(weights.config), 0)  # type: ignore[arg-type]

    found = read_gguf(tmp_path / "model.gguf")

    reference = GGUFReader(tmp_path / "model.gguf")
    assert {name: (entry.offset, entry.ggml_type) for name, entry in found.tensors.items()} == {
        tensor.name: (tensor.data_offset, int(tensor.tensor_type)) for tensor in reference.tensors
    }
    assert found.tensors["token_embd.weight"].shape == (96, 64)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_spoiled_file_is_read_or_refused_but_never_a_crash(data: st.DataObject, small: Path, tmp_path: Path) -> None:
    spoiled = bytearray(small.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(spoiled) - 9))
        spoiled[at : at + 8] = data.draw(
            st.sampled_from([b"\xff" * 8, b"\0" * 8, struct.pack("<Q", 1 << 40), b"GGUFGGUF"])
        )
    path = tmp_path / "spoiled.gguf"
    path.write_bytes(spoiled[: data.draw(st.integers(0, len(spoiled)))])

    with suppress(ModelError):  # anything else fails the test
        read_gguf(path)


def test_files_of_another_kind_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "file.gguf"
    with pytest.raises(ModelNotFound, match="does not exist"):
        read_gguf(path)
    path.write_bytes(b"PK\3\4 something else")
    with pytest.raises(ModelDamaged, match="no GGUF"):
        read_gguf(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(ModelUnsupported, match="version 1"):
        read_gguf(path)
    with pytest.raises(ModelNotFound, match="cannot be read"):
        read_gguf(tmp_path)


def test_arrays_of_arrays_are_refused(tmp_path: Path) -> None:
    key = struct.pack("<Q", 1) + b"k"
    path = tmp_path / "file.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<IIQ", 9, 9, 1) + b"\0" * 64)

    with pytest.raises(ModelDamaged, match="array of arrays"):
        read_gguf(path)


def test_an_invalid_character_in_a_token_does_no_harm(tmp_path: Path) -> None:
    key = struct.pack("<Q", 1) + b"k"
    path = tmp_path / "file.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<IQ", 8, 2) + b"a\xff")

    assert read_gguf(path).metadata == {"k": "a\ufffd"}
