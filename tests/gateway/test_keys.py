import hmac
import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.keys import KeyKind, KeyStore, KeyStoreError

KINDS: tuple[KeyKind, ...] = ("client", "admin", "join")


class Clock:
    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def bearer(text: str) -> bytes:
    return f"Bearer {text}".encode()


def test_a_key_is_let_in_and_its_record_tells_whose_it_is(tmp_path: Path) -> None:
    store = KeyStore.open(tmp_path)

    record, text = store.create("client", name="laptop", tenant="blue", debug=True, requests_per_minute=7)

    assert store.verify(bearer(text), "client") == record
    assert (record.tenant, record.group, record.debug, record.requests_per_minute) == ("blue", "blue", True, 7)


def test_a_tenant_may_be_split_into_sharing_groups(tmp_path: Path) -> None:
    record, _ = KeyStore.open(tmp_path).create("client", name="a", tenant="blue", group="blue-legal")

    assert record.group == "blue-legal"


def test_the_text_shows_its_kind_and_its_id(tmp_path: Path) -> None:
    store = KeyStore.open(tmp_path)

    for kind, prefix in zip(KINDS, ("wp", "wpa", "wpj"), strict=True):
        record, text = store.create(kind, name="a")
        assert text.startswith(f"{prefix}-{record.id}-")


def test_a_key_opens_only_the_doors_of_its_kind(tmp_path: Path) -> None:
    store = KeyStore.open(tmp_path)

    for kind in KINDS:
        record, text = store.create(kind, name="a")
        assert [store.verify(bearer(text), door) is not None for door in KINDS] == [door == kind for door in KINDS]
        assert store.identify(bearer(text)) == record


def test_a_key_with_another_kinds_prefix_is_no_key(tmp_path: Path) -> None:
    store = KeyStore.open(tmp_path)
    _, text = store.create("client", name="a")

    assert store.identify(bearer(text.replace("wp-", "wpa-"))) is None


def test_every_key_is_known_after_a_restart(tmp_path: Path) -> None:
    store = KeyStore.open(tmp_path)
    texts = [store.create(kind, name="a")[1] for kind in KINDS]

    again = KeyStore.open(tmp_path)

    assert all(again.identify(bearer(text)) for text in texts)
    assert again.records() == store.records()
    assert again.salt_for("a") == store.salt_for("a")


def test_a_revoked_key_is_refused_now_and_after_a_restart(tmp_path: Path) -> None:
    store = KeyStore.open(tmp_path)
    record, text = store.create("client", name="a")

    revoked = store.revoke(record.id)

    assert revoked is not None
    assert revoked.revoked
    assert store.verify(bearer(text), "client") is None
    assert KeyStore.open(tmp_path).verify(bearer(text), "client") is None
    assert store.usable("client") == []


def test_revoking_an_unknown_key_says_so(tmp_path: Path) -> None:
    assert KeyStore.open(tmp_path).revoke("nobody") is None


def test_a_key_ends_at_its_expiry(tmp_path: Path) -> None:
    clock = Clock()
    store = KeyStore.open(tmp_path, clock)
    record, text = store.create("client", name="a", expires=clock.now + 10)

    clock.now += 9.9
    assert store.verify(bearer(text), "client") == record

    clock.now += 0.1
    assert store.verify(bearer(text), "client") is None
    assert store.usable("client") == []


def test_only_the_bearer_scheme_counts_in_any_case(tmp_path: Path) -> None:
    store = KeyStore.open(tmp_path)
    _, text = store.create("client", name="a")
    key = text.encode()

    assert all(store.identify(scheme + b" " + key) for scheme in (b"Bearer", b"bearer", b"BEARER", b"Bearer  "))
    assert not any(
        store.identify(value)
        for value in (key, b"Basic " + key, b"Bearer" + key, b"Bearer\t" + key, b"Bearer " + key + b" x", b"Bearer ")
    )


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"Bearer",
        b"Bearer \xc3\xa9",
        b"Bearer wp-",
        b"Bearer wp--",
        b"Bearer wp-abcd-" + b"x" * 10_000,
        b"Bearer wp-' OR 1=1--",
        b"Bearer wp-abcdefghij-%s%s%n{0}\r\n",
        b"Bearer " + b"A" * 100_000,
        b"\x00" * 50,
    ],
)
def test_junk_is_nobodys_key(tmp_path: Path, value: bytes) -> None:
    assert KeyStore.open(tmp_path).identify(value) is None


@pytest.fixture(scope="module")
def one_key(tmp_path_factory: pytest.TempPathFactory) -> tuple[KeyStore, bytes]:
    store = KeyStore.open(tmp_path_factory.mktemp("keys"))
    return store, store.create("client", name="a")[1].encode()


@given(header=st.binary(max_size=300))
def test_no_header_raises_or_is_let_in_by_chance(one_key: tuple[KeyStore, bytes], header: bytes) -> None:
    store, _ = one_key

    assert store.identify(header) is None
    assert store.identify(b"Bearer " + header) is None


@given(data=st.data())
def test_one_changed_byte_shuts_the_door(one_key: tuple[KeyStore, bytes], data: st.DataObject) -> None:
    store, text = one_key
    place = data.draw(st.integers(0, len(text) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda value: value != text[place]))

    assert store.identify(b"Bearer " + text[:place] + bytes([byte]) + text[place + 1 :]) is None


def test_a_failure_while_checking_lets_nobody_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = KeyStore.open(tmp_path)
    _, text = store.create("admin", name="a")

    def broken(*_: object) -> bool:
        raise RuntimeError("no entropy today")

    monkeypatch.setattr(hmac, "compare_digest", broken)

    assert store.identify(bearer(text)) is None


def test_unknown_ids_are_compared_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = KeyStore.open(tmp_path)
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def spy(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return real(left, right)

    monkeypatch.setattr(hmac, "compare_digest", spy)
    store.identify(bearer("wp-abcdefghij-" + "x" * 43))

    assert [(len(left), len(right)) for left, right in compared] == [(32, 32)]


def test_neither_file_holds_the_text_and_both_are_for_the_owner_only(tmp_path: Path) -> None:
    store = KeyStore.open(tmp_path / "state")
    _, text = store.create("client", name="a")

    files = sorted((tmp_path / "state").iterdir())

    assert [file.name for file in files] == ["keys.json", "secrets.json"]
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    secret = text.rsplit("-", 1)[1]
    assert not any(secret in file.read_text() for file in files)
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700


def test_digests_without_the_pepper_are_worthless(tmp_path: Path) -> None:
    store = KeyStore.open(tmp_path)
    record, text = store.create("client", name="a")
    pepper = json.loads((tmp_path / "secrets.json").read_text())["pepper"]

    assert hmac.digest(bytes.fromhex(pepper), text.encode(), "sha256").hex() == record.digest
    assert hmac.digest(bytes(32), text.encode(), "sha256").hex() != record.digest


def test_salts_differ_by_group_and_by_fleet(tmp_path: Path) -> None:
    one, other = KeyStore.open(tmp_path / "one"), KeyStore.open(tmp_path / "other")

    assert one.salt_for("blue") == one.salt_for("blue")
    assert len({one.salt_for("blue"), one.salt_for("red"), other.salt_for("blue")}) == 3
    assert len(one.salt_for("blue")) == 64


def test_a_key_chosen_by_the_operator_is_taken_once(tmp_path: Path) -> None:
    store = KeyStore.open(tmp_path)
    text = "wpj-fleet-" + "s" * 32

    record = store.adopt(text, "join", name="settings")

    assert store.adopt(text, "join", name="settings") == record
    assert store.verify(bearer(text), "join") == record
    assert len(store.records()) == 1


def test_a_rotated_operators_key_replaces_the_old_one(tmp_path: Path) -> None:
    store = KeyStore.open(tmp_path)
    store.adopt("wpj-fleet-" + "s" * 32, "join", name="settings")

    store.adopt("wpj-fleet-" + "t" * 32, "join", name="settings")

    assert store.verify(bearer("wpj-fleet-" + "s" * 32), "join") is None
    assert store.verify(bearer("wpj-fleet-" + "t" * 32), "join") is not None


@pytest.mark.parametrize("text", ["", "secret", "wpa-fleet-" + "s" * 32, "wpj-fleet-short", "wpj-é-" + "s" * 32])
def test_an_operators_key_that_is_no_key_is_refused_without_repeating_it(tmp_path: Path, text: str) -> None:
    with pytest.raises(KeyStoreError, match="wpj-ID-SECRET") as caught:
        KeyStore.open(tmp_path).adopt(text, "join", name="settings")

    assert not text or text not in str(caught.value)


def test_records_without_their_pepper_are_an_error_not_a_lock_out(tmp_path: Path) -> None:
    KeyStore.open(tmp_path).create("client", name="a")
    (tmp_path / "secrets.json").unlink()

    with pytest.raises(KeyStoreError, match=r"secrets\.json is missing"):
        KeyStore.open(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("keys.json", "{"),
        ("keys.json", '{"v": 2, "keys": []}'),
        ("keys.json", '{"keys": [{"id": "a"}]}'),
        ("secrets.json", "{}"),
        ("secrets.json", '{"pepper": "zz", "fleet_secret": "00"}'),
        ("secrets.json", '{"pepper": "00", "fleet_secret": "00"}'),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)

    with pytest.raises(KeyStoreError, match=name.replace(".", r"\.")):
        KeyStore.open(tmp_path)


def test_a_change_that_cannot_be_written_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = KeyStore.open(tmp_path)
    record, text = store.create("client", name="a")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(KeyStoreError, match="No space left"):
        store.revoke(record.id)

    assert store.verify(bearer(text), "client") == record
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["keys.json", "secrets.json"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(KeyStoreError, match="file"):
        KeyStore.open(tmp_path / "file" / "state")
