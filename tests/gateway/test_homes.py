from gateway.homes import Home, Homes
from gateway.processes.messages import Message
from gateway.processes.shared_memory import SharedHomes


def test_a_response_is_found_by_its_owner_alone() -> None:
    homes = Homes()
    homes.made("team-a", "resp_1", Home("r1", "m"))

    assert homes.find("team-a", "resp_1") == Home("r1", "m")
    assert homes.find("team-b", "resp_1") is None
    assert homes.find("team-a", "resp_2") is None


def test_the_least_used_are_forgotten_first() -> None:
    homes = Homes(most=2)
    for name in ("a", "b"):
        homes.made("t", name, Home("r", "m"))
    homes.find("t", "a")

    homes.made("t", "c", Home("r", "m"))

    assert [name for name in "abc" if homes.find("t", name)] == ["a", "c"]
    assert len(homes) == 2


def test_what_is_no_id_takes_no_memory_here_and_no_datagram_to_others() -> None:
    told: list[Message] = []
    homes = SharedHomes(told.append, lambda: None)

    homes.made("t", "x" * 1_000_000, Home("r", "m"))
    homes.made("t", "resp_1", Home("r", "m"))

    assert len(homes) == 1
    assert len(told) == 1
