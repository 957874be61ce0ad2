import pytest

from gateway.upstream.contract import Origin


@pytest.mark.parametrize(
    ("url", "origin", "prefix"),
    [
        ("http://10.0.0.1:8000", Origin("http", "10.0.0.1", 8000), ""),
        ("http://replica", Origin("http", "replica", 80), ""),
        ("https://replica/", Origin("https", "replica", 443), ""),
        ("https://replica:8443/team/a/", Origin("https", "replica", 8443), "/team/a"),
        ("http://[::1]:8000", Origin("http", "::1", 8000), ""),
    ],
)
def test_a_replicas_url_is_an_origin_and_a_prefix(url: str, origin: Origin, prefix: str) -> None:
    assert Origin.parse(url) == (origin, prefix)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "replica:8000",
        "ftp://replica",
        "http://",
        "http://a@replica",
        "http://replica?x=1",
        "http://replica#x",
        "http://replica:0",
        "http://replica:99999",
        "http://replica:port",
    ],
)
def test_what_is_no_replicas_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"URL|[Pp]ort"):
        Origin.parse(url)
