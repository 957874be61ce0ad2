"""Rings, records and documents of keys: pure, so without a store."""

import hmac
import statistics
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.keys import KeyConflict, KeyKind, KeyRecord, KeyRing, KeySecrets
from gateway.keys.records import MAX_LIVE, MAX_RECORDS, Records, added, joined, patched, revoked, rotated
from gateway.keys.sealed import Sealed, SealError, seal, unseal
from gateway.keys.texts import PREFIXES, new_id, new_text, parse_bearer

KINDS: tuple[KeyKind, ...] = ("client", "admin", "join")
NOW = 1_000_000.0
SECRETS = KeySecrets(b"p" * 32, b"f" * 32)


def bearer(text: str) -> bytes:
    return f"Bearer {text}".encode()


def a_key(kind: KeyKind = "client", **fields: Any) -> tuple[KeyRecord, str]:
    key_id = fields.pop("id", None) or new_id()
    text = new_text(kind, key_id)
    values: dict[str, Any] = {"name": "a", "tenant": "blue", "group": "blue", "created": NOW} | fields
    return KeyRecord(id=key_id, kind=kind, digest=SECRETS.digest(text.encode()).hex(), **values), text


def ring_of(*records: KeyRecord) -> KeyRing:
    return KeyRing(records, SECRETS)


# --- who is let in


def test_the_text_shows_its_kind_and_its_id() -> None:
    for kind in KINDS:
        record, text = a_key(kind)
        parsed = parse_bearer(bearer(text))
        assert text.startswith(f"{PREFIXES[kind]}-{record.id}-")
        assert parsed is not None
        assert (parsed.kind, parsed.id) == (kind, record.id)
        assert text.rsplit("-", 1)[1] not in repr(parsed)


def test_a_key_opens_only_the_doors_of_its_kind() -> None:
    for kind in KINDS:
        record, text = a_key(kind)
        ring = ring_of(record)
        assert [ring.verify(bearer(text), door, NOW) is not None for door in KINDS] == [door == kind for door in KINDS]
        assert ring.identify(bearer(text), NOW) == record


def test_a_key_with_another_kinds_prefix_is_no_key() -> None:
    record, text = a_key()

    assert ring_of(record).identify(bearer(text.replace("wp-", "wpa-")), NOW) is None


def test_a_record_whose_kind_was_changed_opens_nothing() -> None:
    record, text = a_key()

    assert ring_of(msgspec.structs.replace(record, kind="admin")).identify(bearer(text), NOW) is None


def test_a_key_ends_at_its_expiry_and_at_its_revocation() -> None:
    record, text = a_key(expires=NOW + 10)

    assert ring_of(record).identify(bearer(text), NOW + 9.9) == record
    assert ring_of(record).identify(bearer(text), NOW + 10) is None
    assert ring_of(msgspec.structs.replace(record, revoked=True)).identify(bearer(text), NOW) is None


def test_only_the_bearer_scheme_counts_in_any_case() -> None:
    record, text = a_key()
    ring, key = ring_of(record), text.encode()

    schemes = (b"Bearer", b"bearer", b"BEARER", b"Bearer  ")
    assert all(ring.identify(scheme + b" " + key, NOW) for scheme in schemes)
    others = (key, b"Basic " + key, b"Bearer" + key, b"Bearer\t" + key, b"Bearer " + key + b" x", b"Bearer ")
    assert not any(ring.identify(value, NOW) for value in others)


JUNK = [
    b"",
    b"Bearer",
    b"Bearer \xc3\xa9",
    b"Bearer wp-",
    b"Bearer wp--",
    b"Bearer wp-abcd-" + b"x" * 10_000,
    b"Bearer wp-' OR 1=1--",
    b"Bearer wp-abcdefghij-%s%s%n{0}\r\n",
    b"Bearer wp-abcdefghij-redis.call('FLUSHALL')",
    b"Bearer " + b"A" * 100_000,
    b"\x00" * 50,
]


@pytest.mark.parametrize("value", JUNK)
def test_junk_is_nobodys_key(value: bytes) -> None:
    assert ring_of(a_key()[0]).identify(value, NOW) is None


ONE_RECORD, ONE_TEXT = a_key()


@given(header=st.binary(max_size=300))
def test_no_header_raises_or_is_let_in_by_chance(header: bytes) -> None:
    ring = ring_of(ONE_RECORD)

    assert ring.identify(header, NOW) is None
    assert ring.identify(b"Bearer " + header, NOW) is None


@given(data=st.data())
def test_one_changed_byte_shuts_the_door(data: st.DataObject) -> None:
    text = ONE_TEXT.encode()
    place = data.draw(st.integers(0, len(text) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda value: value != text[place]))

    changed = text[:place] + bytes([byte]) + text[place + 1 :]
    assert ring_of(ONE_RECORD).identify(b"Bearer " + changed, NOW) is None


def test_a_failure_while_checking_lets_nobody_in(monkeypatch: pytest.MonkeyPatch) -> None:
    record, text = a_key("admin")

    def broken(*_: object) -> bool:
        raise RuntimeError("no entropy today")

    monkeypatch.setattr(hmac, "compare_digest", broken)

    assert ring_of(record).identify(bearer(text), NOW) is None


# --- how long it takes


def wrong_keys() -> dict[str, tuple[KeyRing, bytes]]:
    """One of each class of keys that a clock might tell apart."""
    record, text = a_key()
    gone, gone_text = a_key(revoked=True)
    ring = ring_of(record, gone)
    secret = text.rsplit("-", 1)[1]
    return {
        "unknown id": (ring, bearer(new_text("client", new_id()))),
        "right id, wrong secret": (ring, bearer(new_text("client", record.id))),
        "right id, last character wrong": (ring, bearer(text[:-1] + ("a" if secret[-1] != "a" else "b"))),
        "revoked": (ring, bearer(gone_text)),
    }


def test_every_wrong_key_costs_one_digest_and_one_comparison_of_32_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    real_digest, real_compare = hmac.digest, hmac.compare_digest
    done: list[str] = []

    def digest(key: bytes, text: bytes, kind: str) -> bytes:
        done.append(f"digest of {len(text)}")
        return real_digest(key, text, kind)

    def compare(left: bytes, right: bytes) -> bool:
        done.append(f"compare {type(left).__name__} of {len(left)} and {len(right)}")
        return real_compare(left, right)

    monkeypatch.setattr(hmac, "digest", digest)
    monkeypatch.setattr(hmac, "compare_digest", compare)
    work = {}
    for name, (ring, header) in wrong_keys().items():
        done.clear()
        assert ring.identify(header, NOW) is None
        work[name] = tuple(done)

    assert set(work.values()) == {("digest of 57", "compare bytes of 32 and 32")}


def test_the_clock_does_not_tell_wrong_keys_apart() -> None:
    """CPU time of this thread, in turns, medians of batches: what else the machine does moves none of it far."""
    keys = wrong_keys()
    batches: dict[str, list[float]] = {name: [] for name in keys}
    for _ in range(100):
        for name, (ring, header) in keys.items():
            began = time.thread_time()
            for _ in range(100):
                ring.identify(header, NOW)
            batches[name].append((time.thread_time() - began) / 100)

    medians = [statistics.median(times) for times in batches.values()]
    assert max(medians) - min(medians) < 5e-6


# --- what is told of it, and to whom


def test_salts_differ_by_group_and_by_fleet() -> None:
    one, other = ring_of(), KeyRing((), KeySecrets(b"p" * 32, b"g" * 32))

    assert one.salt_for("blue") == one.salt_for("blue")
    assert len({one.salt_for("blue"), one.salt_for("red"), other.salt_for("blue")}) == 3
    assert len(one.salt_for("blue")) == 64


def test_a_ring_crosses_to_another_process_whole() -> None:
    record, text = a_key(scopes=("chat",), models=("m*",), expires=NOW + 5)
    ring = ring_of(record)

    there = KeyRing.decode(ring.encode())

    assert there.identify(bearer(text), NOW) == record
    assert there.records() == ring.records()
    assert there.salt_for("blue") == ring.salt_for("blue")


@pytest.mark.parametrize("data", [b"", b"\x90", b"\xff" * 9])
def test_what_is_no_ring_is_refused(data: bytes) -> None:
    with pytest.raises((msgspec.MsgspecError, ValueError)):
        KeyRing.decode(data)


def test_nothing_of_a_ring_is_printed() -> None:
    record, _ = a_key()
    printed = f"{ring_of(record)} {SECRETS} {SECRETS!r}"

    assert "pppp" not in printed
    assert record.digest not in printed


def test_scopes_and_models_that_are_not_named_are_all() -> None:
    free, _ = a_key()
    bound, _ = a_key(scopes=("chat", "models"), models=("qwen*", "org/exact[1]"))

    assert free.may_use("embeddings")
    assert free.may_ask("anything")
    assert [bound.may_use("chat"), bound.may_use("completions")] == [True, False]
    asked = ("qwen3-8b", "Qwen3", "org/exact[1]", "org/exact1", "org/exact2", "")
    assert [bound.may_ask(model) for model in asked] == [True, False, True, True, False, False]


# --- changes


@given(st.lists(st.tuples(st.sampled_from("arRpt"), st.integers(0, 9), st.sampled_from("xy")), max_size=40))
def test_whatever_is_done_no_name_has_more_than_two_live_keys(steps: list[tuple[str, int, str]]) -> None:
    """a: add, r: rotate, R: revoke, p: patch its name, t: let time pass."""
    records: Records = {}
    now = NOW
    for step, number, name in steps:
        known = list(records)
        key_id = known[number % len(known)] if known else "none"
        try:
            if step == "a":
                records = added(records, a_key(name=name)[0], now)
            elif step == "r" and known:
                records, _ = rotated(records, key_id, a_key()[0], 10.0 * number, now)
            elif step == "R" and known:
                records, _ = revoked(records, key_id, now, other_admins=0)
            elif step == "p" and known:
                records, _ = patched(records, key_id, {"name": name}, now)
        except KeyConflict:
            pass
        now += 5 if step == "t" else 0

        live = [record for record in records.values() if record.is_live(now)]
        assert all(len([key for key in live if key.name == each]) <= MAX_LIVE for each in "xy")


def test_what_opens_nothing_makes_room_when_there_are_too_many() -> None:
    records: Records = {
        f"k{number:04}": a_key(id=f"k{number:04}", name=f"n{number}", revoked=number == 7)[0]
        for number in range(MAX_RECORDS)
    }

    fuller = added(records, a_key(name="one")[0], NOW)

    assert len(fuller) == MAX_RECORDS
    assert "k0007" not in fuller
    with pytest.raises(KeyConflict, match="limit"):
        added(fuller, a_key(name="two")[0], NOW)


def test_of_two_histories_everything_stays_and_what_is_revoked_stays_revoked() -> None:
    both, mine, theirs = (a_key(id=name)[0] for name in ("both", "mine", "theirs"))
    gone = msgspec.structs.replace(both, revoked=True)

    for stored, known in (({"both": both}, {"both": gone}), ({"both": gone}, {"both": both})):
        found = joined({**stored, "theirs": theirs}, {**known, "mine": mine})
        assert found == {"both": gone, "mine": mine, "theirs": theirs}


# --- documents


def test_a_document_opens_again_and_only_with_its_pepper() -> None:
    sealed = Sealed(7, {ONE_RECORD.id: ONE_RECORD})
    document = seal(sealed, SECRETS)

    assert unseal(document, SECRETS) == sealed
    with pytest.raises(SealError, match="another pepper"):
        unseal(document, KeySecrets(b"q" * 32, SECRETS.fleet_secret))


@given(data=st.data())
def test_a_changed_document_is_not_believed(data: st.DataObject) -> None:
    sealed = Sealed(7, {ONE_RECORD.id: ONE_RECORD})
    document = seal(sealed, SECRETS)
    place = data.draw(st.integers(0, len(document) - 1))
    byte = data.draw(st.integers(0, 255))

    try:
        found = unseal(document[:place] + bytes([byte]) + document[place + 1 :], SECRETS)
    except SealError:
        return
    assert found == sealed  # a change that says the same


def test_a_header_that_was_let_in_costs_no_digest_the_next_time_and_still_expires(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record, text = a_key(expires=NOW + 10)
    ring = ring_of(record)
    assert ring.identify(bearer(text), NOW) == record

    monkeypatch.setattr(hmac, "digest", None)

    assert ring.identify(bearer(text), NOW + 9.9) == record
    assert ring.identify(bearer(text), NOW + 10) is None


def test_what_a_ring_remembers_of_headers_is_bounded_and_holds_no_text_of_a_key() -> None:
    record, text = a_key()
    ring = ring_of(record)

    for spaces in range(1, 40):
        assert ring.identify(b"Bearer" + b" " * spaces + text.encode(), NOW) == record
        assert ring.identify(b"Bearer" + b" " * spaces + text[:-1].encode(), NOW) is None

    assert len(ring._let_in) == 39
    assert not any(text[-20:].encode() in kept for kept in ring._let_in)
