import pytest

from loadtest.arms import Ours, parse_peer

URLS = ["http://127.0.0.1:1", "http://127.0.0.1:2"]


def test_urls_are_words_of_their_own_or_joined_by_commas() -> None:
    apart = parse_peer("sglang=router --port {port} --metrics {spare_port} --worker-urls {workers}")
    joined = parse_peer("mine='my router' --listen=127.0.0.1:{port} --to={workers}")

    assert apart.command(7, 9, URLS) == ["router", "--port", "7", "--metrics", "9", "--worker-urls", *URLS]
    assert joined.command(7, 9, URLS) == ["my router", "--listen=127.0.0.1:7", f"--to={URLS[0]},{URLS[1]}"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("router --port {port} {workers}", "NAME=COMMAND"),
        ("x=router --port {port}", "no {workers}"),
        ("x=router {workers}", "no {port}"),
        ("x=router {port} {workers} {worker}", "{worker} is none of"),
        ("x=router '{port} {workers}", "No closing quotation"),
    ],
)
def test_a_command_that_cannot_be_filled_in_is_refused(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        parse_peer(text)


def test_the_two_modes_of_a_policy_have_different_names() -> None:
    assert Ours("cost").name != Ours("cost", "plain").name


def test_an_arm_says_of_how_many_processes_and_gateways_it_is() -> None:
    assert Ours("cost", processes=4).name == "cost (4 processes)"
    assert Ours("cost", "plain", processes=4, gateways=2).name == "cost (plain, 4 processes, 2 gateways)"
