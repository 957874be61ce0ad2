import ipaddress
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admin.addresses import AddressNotAllowed, AllowList, PortRange, base_url, pinned_url, resolve_host

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

ALLOWED = AllowList(
    networks=[
        ipaddress.ip_network("127.0.0.0/8"),
        ipaddress.ip_network("10.1.0.0/16"),
        ipaddress.ip_network("::1/128"),
    ],
    ports=[PortRange(8000, 8999), PortRange(443, 443)],
)


class Names:
    """A resolver that knows what it was told and otherwise reads addresses."""

    def __init__(self, **known: Sequence[str]) -> None:
        self.known = known
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[Address]:
        self.asked.append(host)
        if host in self.known:
            return [ipaddress.ip_address(address) for address in self.known[host]]
        return [ipaddress.ip_address(host)]


@pytest.mark.parametrize(
    ("url", "pinned"),
    [
        ("http://127.0.0.1:8100", "http://127.0.0.1:8100"),
        ("http://127.0.0.1:8100/", "http://127.0.0.1:8100"),
        ("HTTP://127.0.0.1:8100", "http://127.0.0.1:8100"),
        ("http://[::1]:8100", "http://[::1]:8100"),
        ("http://worker:8100", "http://10.1.2.3:8100"),
        ("http://both:8100", "http://127.0.0.1:8100"),
        ("https://worker", "https://worker:443"),
    ],
)
async def test_an_allowed_url_becomes_one_that_cannot_point_elsewhere_later(url: str, pinned: str) -> None:
    names = Names(worker=["10.1.2.3"], both=["::1", "127.0.0.1"])

    assert await pinned_url(url, ALLOWED, names) == pinned


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254:8100",
        "http://0.0.0.0:8100",
        "http://[::]:8100",
        "http://[::ffff:169.254.169.254]:8100",
        "http://192.168.0.1:8100",
        "http://127.0.0.1:22",
        "http://127.0.0.1:6379",
        "http://127.0.0.1",
        "http://127.0.0.1:0",
        "http://127.0.0.1:99999",
        "http://user@127.0.0.1:8100",
        "http://user:secret@127.0.0.1:8100",
        "http://@127.0.0.1:8100",
        "http://127.0.0.1:8100/admin",
        "http://127.0.0.1:8100?x=1",
        "http://127.0.0.1:8100?",
        "http://127.0.0.1:8100#x",
        "http://127.0.0.1:8100\\@169.254.169.254",
        "http://127.0.0.1:8100\r\nHost: x",
        "http://127.0.0.1 :8100",
        "http://127.0.0.1%2f:8100",
        "http://ⓛocalhost:8100",
        "ftp://127.0.0.1:8100",
        "file:///etc/passwd",
        "//127.0.0.1:8100",
        "127.0.0.1:8100",
        "http://",
        "http://:8100",
        "http://[::1:8100",
        "http://partly:8100",
        "http://" + "a" * 600,
        "",
    ],
)
async def test_every_other_url_is_refused(url: str) -> None:
    names = Names(partly=["127.0.0.1", "169.254.169.254"])

    with pytest.raises(AddressNotAllowed):
        await pinned_url(url, ALLOWED, names)


async def test_a_mapped_address_counts_as_the_one_it_reaches() -> None:
    assert ALLOWED.permits(ipaddress.ip_address("::ffff:127.0.0.1"), 8100)
    assert not ALLOWED.permits(ipaddress.ip_address("::ffff:8.8.8.8"), 8100)


@pytest.mark.parametrize("host", ["127.1", "0x7f.1", "2130706433", "0177.0.0.1"])
async def test_odd_forms_of_an_address_are_seen_for_what_they_are(host: str) -> None:
    assert await pinned_url(f"http://{host}:8100", ALLOWED, resolve_host) == "http://127.0.0.1:8100"
    outside = AllowList([ipaddress.ip_network("10.0.0.0/8")], ALLOWED.ports)
    with pytest.raises(AddressNotAllowed):
        await pinned_url(f"http://{host}:8100", outside, resolve_host)


async def test_a_name_that_cannot_be_resolved_is_refused() -> None:
    async def fails(host: str, port: int) -> Sequence[Address]:
        raise OSError("no such name")

    with pytest.raises(AddressNotAllowed, match="resolved"):
        await pinned_url("http://nowhere:8100", ALLOWED, fails)


@given(url=st.text(max_size=60) | st.text("htps:/[]@.1270#?%\\ \t\n8", max_size=30).map("http://".__add__))
async def test_no_text_does_more_than_be_refused(url: str) -> None:
    async def resolve(host: str, port: int) -> Sequence[Address]:
        return [ipaddress.ip_address("10.1.0.1")]

    try:
        pinned = await pinned_url(url, ALLOWED, resolve)
    except AddressNotAllowed:
        return
    assert pinned.startswith(("http://10.1.0.1:", "https://"))


@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("http://example.com", "http://example.com:80"),
        ("https://Example.com/", "https://example.com:443"),
        ("http://example.com:9000/v1", "http://example.com:9000"),
        ("http://example.com:9000/v1/", "http://example.com:9000"),
        ("http://example.com/llm/v1", "http://example.com:80/llm"),
        ("http://[2001:db8::1]:9000", "http://[2001:db8::1]:9000"),
    ],
)
def test_an_operators_url_is_normalized(url: str, normal: str) -> None:
    assert base_url(url) == normal
    assert base_url(normal) == normal


@pytest.mark.parametrize(
    "url", ["http://example.com/../x", "http://example.com//x", "http://example.com/a b", "example.com"]
)
def test_an_operators_url_must_still_be_one(url: str) -> None:
    with pytest.raises(AddressNotAllowed):
        base_url(url)


def test_port_ranges_are_read_and_written_alike() -> None:
    assert PortRange.parse("8000") == PortRange(8000, 8000)
    assert PortRange.parse("8000-8999") == PortRange(8000, 8999)
    assert [str(PortRange(80, 80)), str(PortRange(1, 65535))] == ["80", "1-65535"]
    assert 80 in PortRange(80, 81)
    assert 82 not in PortRange(80, 81)


@pytest.mark.parametrize("text", ["", "-", "a", "0", "9-8", "1-65536", "1-2-3", "-1", "1-", "٣"])
def test_other_texts_are_no_port_range(text: str) -> None:
    with pytest.raises(ValueError, match="port range"):
        PortRange.parse(text)
