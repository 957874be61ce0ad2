"""Which addresses a replica may have: the guard against being made to call somebody else's service.

Whoever may register a replica chooses where the gateway sends prompts and credentials, so a registered URL must point into
networks and ports that the operator allowed. A name is resolved once, checked, and for http replaced by the address that was
checked: it cannot point elsewhere later (DNS rebinding). For https the name stays, because the certificate vouches for it.
Addresses from the operator's own settings need no permission, only a valid form.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, urlsplit

__all__ = [
    "AddressNotAllowed",
    "AllowList",
    "Network",
    "PortRange",
    "Resolve",
    "base_url",
    "pinned_url",
    "resolve_host",
]

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolve = Callable[[str, int], Awaitable[Sequence[Address]]]

_RESOLVE_S: Final = 2.0
_MAX_URL_CHARS: Final = 512
_HOST: Final = re.compile(r"[A-Za-z0-9._-]{1,253}|[0-9A-Fa-f:.]{2,45}")
_PORTS: Final = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
_PORTS_FORM: Final = "a port range is like 8000 or 8000-8999, within 1-65535"
_PREFIX: Final = re.compile(r"(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")


class AddressNotAllowed(ValueError):
    """The URL is none that the gateway may call. Says why, but nothing about what answers there."""


@dataclass(frozen=True, slots=True)
class PortRange:
    """Ports `first` to `last`, both included; written ``8000`` or ``8000-8999``."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.last <= 65535:
            raise ValueError(_PORTS_FORM)

    @classmethod
    def parse(cls, text: str) -> PortRange:
        found = _PORTS.fullmatch(text)
        if found is None:
            raise ValueError(_PORTS_FORM)
        return cls(int(found[1]), int(found[2] or found[1]))

    def __contains__(self, port: int) -> bool:
        return self.first <= port <= self.last

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


@dataclass(frozen=True, slots=True)
class AllowList:
    networks: Sequence[Network]
    ports: Sequence[PortRange]

    def permits(self, address: Address, port: int) -> bool:
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped  # ::ffff:10.0.0.1 reaches 10.0.0.1
        return any(port in ports for ports in self.ports) and any(address in network for network in self.networks)


def base_url(url: str) -> str:
    """The normal form of a replica's URL: scheme, host, port and perhaps a path prefix, without the ``/v1`` that people
    copy from their client's settings. Raises `AddressNotAllowed` for anything else.
    """
    parts = _split(url)
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    if not _PREFIX.fullmatch(prefix):
        raise AddressNotAllowed("the path of a replica's URL may only be a plain prefix")
    return f"{parts.scheme}://{_host_port(parts)}{prefix}"


async def pinned_url(url: str, allow: AllowList, resolve: Resolve) -> str:
    """The URL to call instead of `url`, which somebody else chose. Raises `AddressNotAllowed`."""
    parts = _split(url)
    if parts.path not in ("", "/"):
        raise AddressNotAllowed("a replica's URL has no path")
    host, port = parts.hostname or "", _port(parts)
    try:
        async with asyncio.timeout(_RESOLVE_S):
            addresses = await resolve(host, port)
    except (OSError, TimeoutError, UnicodeError) as error:
        raise AddressNotAllowed("the host of the URL cannot be resolved") from error
    if not addresses or not all(allow.permits(address, port) for address in addresses):
        raise AddressNotAllowed(
            "the URL is outside the networks and ports that registry.networks and registry.ports allow"
        )
    if parts.scheme == "https":
        return f"https://{_host_port(parts)}"
    # IPv4 first: `localhost` is both, and servers listen on 127.0.0.1 far more often than on ::1 alone.
    address = min(addresses, key=lambda candidate: candidate.version)
    return f"http://[{address}]:{port}" if address.version == 6 else f"http://{address}:{port}"


async def resolve_host(host: str, port: int) -> Sequence[Address]:
    """All addresses of a host by the system's resolver, which also reads odd forms of numbers (0177.1, 2130706433)."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [ipaddress.ip_address(str(sockaddr[0]).partition("%")[0]) for *_, sockaddr in found]


def _split(url: str) -> SplitResult:
    if len(url) > _MAX_URL_CHARS or not url.isascii() or not url.isprintable():
        raise AddressNotAllowed("the URL is too long or holds characters that no URL has")
    try:
        parts = urlsplit(url)
        _port(parts)
    except ValueError as error:
        raise AddressNotAllowed("the URL cannot be parsed") from error
    if parts.scheme not in ("http", "https"):
        raise AddressNotAllowed("the URL must begin with http:// or https://")
    if "@" in parts.netloc or parts.query or parts.fragment or url.endswith(("?", "#")):
        raise AddressNotAllowed("the URL may not carry user information, a query or a fragment")
    if not _HOST.fullmatch(parts.hostname or ""):
        raise AddressNotAllowed("the URL has no valid host")
    return parts


def _port(parts: SplitResult) -> int:
    if parts.port == 0:
        raise ValueError("port 0")
    return parts.port or (443 if parts.scheme == "https" else 80)


def _host_port(parts: SplitResult) -> str:
    host = parts.hostname or ""
    return f"[{host}]:{_port(parts)}" if ":" in host else f"{host}:{_port(parts)}"
