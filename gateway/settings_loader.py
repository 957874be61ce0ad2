"""Everything that can be set: one YAML file, ``WARMPATH_*`` variables and flags become one frozen value, at the
start and whenever they are read again.

Flags win over the environment, the environment over the file, the file over the defaults here. A nested setting's variable
has two underscores: ``WARMPATH_SERVER__PORT=9000``; lists are JSON. A secret may stand in a file of its own, which is named
instead: ``admin: {key_file: /run/secrets/key}``, ``WARMPATH_ADMIN__KEY_FILE=/run/secrets/key``. Unknown names are refused, and
all faults are told at once. Nothing else in the gateway reads the environment: everybody else receives values
(`gateway.settings`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, get_args

import yaml
from pydantic import (
    BaseModel,
    SecretStr,
    ValidationError,
)
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict
from pydantic_settings import SettingsError as EnvironmentFault

from gateway.settings import Settings

__all__ = ["SettingsError", "load_settings", "redacted"]

_PREFIX: Final = "WARMPATH_"


class SettingsError(Exception):
    """The settings cannot be used. One line for each fault, with the dotted name of what is wrong."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


class _Environment(Settings, BaseSettings):
    """Tells pydantic-settings what to look for; never made itself."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, env_nested_delimiter="__")


def load_settings(file: Path | None = None, flags: Mapping[str, Any] | None = None) -> Settings:
    """Read everything. `flags`: nested like the file. Raises `SettingsError` naming every fault."""
    values: dict[str, Any] = {}
    faults: list[str] = []
    file_values = _read_file(file) if file is not None else {}
    for layer in (_read_otel_environment(), file_values, _read_environment(), flags or {}):
        values = _merged(values, _with_secret_files(Settings, layer, "", faults))
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        faults += [_fault(detail["loc"], detail["type"], detail["msg"]) for detail in error.errors()]
    if faults:
        raise SettingsError(faults) from None
    return settings


def redacted(settings: Settings) -> str:
    """The settings as YAML that loads again, with secrets masked."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False)


def _fault(place: tuple[int | str, ...], kind: str, message: str) -> str:
    if kind == "extra_forbidden":
        message = "there is no such setting"
    message = message.removeprefix("Value error, ")
    return f"{'.'.join(map(str, place))}: {message}" if place else message


def _with_secret_files(
    group: type[BaseModel], values: Mapping[str, Any], place: str, faults: list[str]
) -> dict[str, Any]:
    """`values` with each ``NAME_file`` of a secret replaced by NAME and what the file holds. Adds to `faults`."""
    found = dict(values)
    for name, field in group.model_fields.items():
        if _is_secret(field.annotation) and f"{name}_file" in found:
            file = found.pop(f"{name}_file")
            try:
                if found.get(name) is not None:
                    raise ValueError(f"{name} is given too")
                found[name] = Path(file).read_text(encoding="utf-8").rstrip("\r\n")
            except (OSError, ValueError, TypeError) as error:
                why = error.strerror if isinstance(error, OSError) else error
                faults.append(f"{place}{name}_file: {'no text' if isinstance(why, UnicodeDecodeError) else why}")
        for inner in _groups_in(field.annotation):
            below = found.get(name)
            if isinstance(below, Mapping):
                found[name] = _with_secret_files(inner, below, f"{place}{name}.", faults)
            elif isinstance(below, (list, tuple)):
                found[name] = [
                    _with_secret_files(inner, item, f"{place}{name}.{index}.", faults)
                    if isinstance(item, Mapping)
                    else item
                    for index, item in enumerate(below)
                ]
    return found


def _is_secret(annotation: Any) -> bool:
    return SecretStr in get_args(annotation)


def _groups_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The group that a setting is, or is a list of."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield kind


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Both, group by group; a list is one value and is replaced whole."""
    result = dict(under)
    for name, value in over.items():
        below = result.get(name)
        result[name] = _merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result


def _read_environment() -> dict[str, Any]:
    try:
        values: dict[str, Any] = EnvSettingsSource(_Environment)()
    except EnvironmentFault as error:
        raise SettingsError([f"environment: {error}"]) from None
    # Names without __ may be other commands' or Kubernetes' own (a service named warmpath yields WARMPATH_PORT), so only
    # nested names are sure to be meant for us; an unknown group is handed on, to be refused like one in the file.
    for name in os.environ:
        group, nested, _ = name.upper().removeprefix(_PREFIX).partition("__")
        if name.upper().startswith(_PREFIX) and nested and group.lower() not in Settings.model_fields:
            values[group.lower()] = {}
    return values


def _read_otel_environment() -> dict[str, Any]:
    """The standard variables that decide what the gateway records. The SDK reads those that say how it is sent."""
    tracing: dict[str, Any] = {}
    if exporter := os.environ.get("OTEL_TRACES_EXPORTER"):
        tracing["exporter"] = exporter
    if service_name := os.environ.get("OTEL_SERVICE_NAME"):
        tracing["service_name"] = service_name
    if sampler := os.environ.get("OTEL_TRACES_SAMPLER"):
        rule = sampler.removeprefix("parentbased_")
        if rule not in ("always_on", "always_off", "traceidratio"):
            raise SettingsError([f"OTEL_TRACES_SAMPLER: there is no sampler '{sampler}' here"])
        tracing["follow_caller"] = rule != sampler
        ratio = os.environ.get("OTEL_TRACES_SAMPLER_ARG", "1")
        tracing["sample_ratio"] = {"always_on": 1.0, "always_off": 0.0}.get(rule, ratio)
    return {"tracing": tracing} if tracing else {}


def _read_file(file: Path) -> dict[str, Any]:
    try:
        with file.open(encoding="utf-8") as stream:
            values = yaml.load(stream, Loader=_StrictLoader)  # noqa: S506 - it is a SafeLoader
    except OSError as error:
        raise SettingsError([f"{file}: {error.strerror}"]) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError([f"{file}: {' '.join(str(error).split())}"]) from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise SettingsError([f"{file}: must hold settings by name, like 'server: {{port: 8000}}'"])
    return values


class _StrictLoader(yaml.SafeLoader):
    """Refuses a name that appears twice; YAML readers silently keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [name.value for name, _ in node.value]
        for index, name in enumerate(names):
            if name in names[:index]:
                place = node.value[index][0].start_mark
                raise yaml.constructor.ConstructorError(None, None, f"'{name}' appears twice", place)
        return super().construct_mapping(node, deep)
