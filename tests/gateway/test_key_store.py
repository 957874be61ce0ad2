"""Stores of keys over both storages, and what is particular to each: files and a real Redis."""

import asyncio
import hmac
import json
import os
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis import Redis

from gateway.keys import GivenKey, KeyConflict, KeyKind, KeyRecord, KeyRing, KeyStore, KeyStoreError, UnknownKey
from gateway.keys.file_storage import FileStorage
from gateway.keys.opening import open_key_store
from gateway.keys.redis_storage import RedisStorage
from gateway.limits import Quota
from gateway.settings import Settings
from tests.redis_server import RedisServer, redis_server
from tests.serving import eventually

KINDS: tuple[KeyKind, ...] = ("client", "admin", "join")
PEPPER, FLEET_SECRET = "ab" * 32, "cd" * 32


class Clock:
    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def bearer(text: str) -> bytes:
    return f"Bearer {text}".encode()


class Place:
    """A storage, and every gateway that opens it. All share one clock."""

    def __init__(self, settings: dict[str, Any], redis: RedisServer | None) -> None:
        self.settings = settings
        self.redis = redis
        self.clock = Clock()
        self._open: list[KeyStore] = []

    async def open(self, **more: Any) -> KeyStore:
        store = await open_key_store(Settings.model_validate({**self.settings, **more}), self.clock)
        self._open.append(store)
        return store

    async def aclose(self) -> None:
        for store in self._open:
            await store.aclose()

    @property
    def modes(self) -> dict[str, int]:
        """Of the state folder and all in it, by name."""
        folder: Path = self.settings["state_dir"]
        return {file.name: stat.S_IMODE(file.stat().st_mode) for file in [*sorted(folder.iterdir()), folder]}

    def read(self, name: str) -> str:
        return (self.settings["state_dir"] / name).read_text()  # type: ignore[no-any-return]

    def write(self, name: str, content: str) -> None:
        self.settings["state_dir"].mkdir(exist_ok=True)
        (self.settings["state_dir"] / name).write_text(content)

    def who(self, store: KeyStore, text: str) -> KeyRecord | None:
        return store.ring.identify(bearer(text), self.clock.now)


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@asynccontextmanager
async def file_place(folder: Path) -> AsyncIterator[Place]:
    place = Place({"state_dir": folder / "state"}, None)
    yield place
    await place.aclose()


@asynccontextmanager
async def redis_place(folder: Path, redis: RedisServer) -> AsyncIterator[Place]:
    redis.call("FLUSHALL")
    secrets = {"pepper": PEPPER, "fleet_secret": FLEET_SECRET}
    place = Place({"state_dir": folder / "state", "redis": {"url": redis.url}, "keys": secrets}, redis)
    yield place
    await place.aclose()


@pytest.fixture(params=["file", "redis"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    made = file_place(tmp_path) if request.param == "file" else redis_place(tmp_path, request.getfixturevalue("redis"))
    async with made as place:
        yield place


@pytest.fixture
async def files(tmp_path: Path) -> AsyncIterator[Place]:
    async with file_place(tmp_path) as place:
        yield place


@pytest.fixture
async def shared(tmp_path: Path, redis: RedisServer) -> AsyncIterator[Place]:
    async with redis_place(tmp_path, redis) as place:
        yield place


# --- both


async def test_a_key_is_let_in_and_its_record_tells_whose_it_is(place: Place) -> None:
    store = await place.open()
    limits = Quota(requests_per_minute=7)

    record, text = await store.create("client", name="laptop", tenant="blue", debug=True, limits=limits, models=("m*",))

    assert store.ring.verify(bearer(text), "client", place.clock.now) == record
    assert (record.tenant, record.group, record.debug, record.limits) == ("blue", "blue", True, limits)
    assert record.may_ask("mistral")
    assert not record.may_ask("llama")


async def test_every_key_is_known_after_a_restart(place: Place) -> None:
    store = await place.open()
    texts = [(await store.create(kind, name="a"))[1] for kind in KINDS]

    again = await place.open()

    assert all(place.who(again, text) for text in texts)
    assert again.ring.records() == store.ring.records()
    assert again.salt_for("a") == store.salt_for("a")


async def test_a_revoked_key_is_refused_now_and_after_a_restart(place: Place) -> None:
    store = await place.open()
    record, text = await store.create("client", name="a")

    assert (await store.revoke(record.id)).revoked
    assert (await store.revoke(record.id)).revoked

    assert place.who(store, text) is None
    assert place.who(await place.open(), text) is None
    assert store.ring.usable("client", place.clock.now) == []


async def test_a_key_that_is_none_cannot_be_changed(place: Place) -> None:
    store = await place.open()

    for change in (store.revoke("nobody"), store.rotate("nobody", 1), store.patch("nobody", {"debug": True})):
        with pytest.raises(UnknownKey):
            await change


async def test_a_patch_changes_what_it_names(place: Place) -> None:
    store = await place.open()
    limits = Quota(requests_per_minute=7, tokens_per_day=100)
    record, text = await store.create("client", name="a", limits=limits)

    await store.patch(record.id, {"limits": {"tokens_per_day": None, "usd_per_day": 2.5}, "scopes": ("chat",)})

    found = place.who(await place.open(), text)
    assert found is not None
    assert found.limits == Quota(requests_per_minute=7, usd_per_day=2.5)
    assert (found.scopes, found.name) == (("chat",), "a")
    with pytest.raises(msgspec.ValidationError):
        await store.patch(record.id, {"limits": {"requests_per_minute": 0}})


async def test_rotation_leaves_both_keys_open_for_the_overlap(place: Place) -> None:
    store = await place.open()
    record, old = await store.create("client", name="a", tenant="blue", models=("m",), debug=True)
    place.clock.now += 100

    successor, new = await store.rotate(record.id, 60)

    assert (successor.tenant, successor.models, successor.debug) == ("blue", ("m",), True)
    assert successor.created == place.clock.now
    place.clock.now += 59
    assert place.who(store, old)
    assert place.who(store, new)
    place.clock.now += 1
    assert place.who(store, old) is None
    assert place.who(store, new)


async def test_there_is_room_for_a_successor_and_not_for_more(place: Place) -> None:
    store = await place.open()
    first, _ = await store.create("client", name="a")
    await store.rotate(first.id, 60)

    for change in (store.rotate(first.id, 60), store.create("client", name="a")):
        with pytest.raises(KeyConflict, match="Revoke one first") as caught:
            await change
        assert caught.value.code == "too_many_live_keys"

    await store.create("client", name="b")
    await store.create("client", name="a", tenant="other")
    place.clock.now += 60
    await store.create("client", name="a")


async def test_the_last_admin_key_stays(place: Place) -> None:
    store = await place.open()
    one, _ = await store.create("admin", name="one")
    two, _ = await store.create("admin", name="two")

    ends = await asyncio.gather(store.revoke(one.id), store.revoke(two.id), return_exceptions=True)

    assert [type(end) for end in ends] == [KeyRecord, KeyConflict]
    assert len(store.ring.usable("admin", place.clock.now)) == 1


async def test_subscribers_get_every_ring_until_they_leave(place: Place) -> None:
    store = await place.open()
    rings: list[KeyRing] = []
    leave = store.subscribe(rings.append)

    record, text = await store.create("client", name="a")
    await store.revoke(record.id)
    leave()
    await store.create("client", name="b")

    now = place.clock.now
    assert [ring.identify(bearer(text), now) is not None for ring in rings] == [True, False]


async def test_first_keys_are_made_once(place: Place) -> None:
    store = await place.open()

    made = await asyncio.gather(*(store.create_first("admin", name="first") for _ in range(3)))

    assert len([text for text in made if text is not None]) == 1
    assert await (await place.open()).create_first("admin", name="first") is None


async def test_a_change_is_made_though_its_caller_leaves(place: Place) -> None:
    store = await place.open()
    record, text = await store.create("client", name="a")

    revoking = asyncio.create_task(store.revoke(record.id))
    await asyncio.sleep(0)
    revoking.cancel()
    await asyncio.gather(revoking, return_exceptions=True)
    await store.create("client", name="after")  # changes wait for each other

    assert place.who(store, text) is None
    assert place.who(await place.open(), text) is None


async def test_records_of_another_pepper_are_an_error_not_a_lock_out(place: Place) -> None:
    await (await place.open()).create("client", name="a")

    with pytest.raises(KeyStoreError, match="another pepper"):
        await place.open(keys={"pepper": "ef" * 32, "fleet_secret": FLEET_SECRET})


# --- keys from the settings


def given(text: str, **fields: Any) -> GivenKey:
    return GivenKey(kind="client", name="ci", text=text, **fields)


async def test_a_key_of_the_settings_opens_while_it_stands_there(place: Place) -> None:
    text = "wp-team-" + "s" * 32
    store = await place.open(keys={**place.settings.get("keys", {}), "static": [{"name": "ci", "key": text}]})
    before = place.who(store, text)
    place.clock.now += 5

    store.give([given(text, models=("m",))])
    changed = place.who(store, text)
    store.give([])

    assert before is not None
    assert changed is not None
    assert (before.models, changed.models) == ((), ("m",))
    assert before.created == changed.created
    assert before.source == "settings"
    assert place.who(store, text) is None
    assert place.who(await place.open(), text) is None


async def test_a_key_can_be_given_as_its_digest(files: Place) -> None:
    text = "wp-team-" + "s" * 32
    digest = hmac.digest(bytes.fromhex(PEPPER), text.encode(), "sha256").hex()
    static = [{"name": "ci", "id": "team", "digest": digest}]

    store = await files.open(keys={"pepper": PEPPER, "fleet_secret": FLEET_SECRET, "static": static})

    assert files.who(store, text) is not None
    assert files.who(store, "wp-team-" + "t" * 32) is None
    assert not (files.settings["state_dir"] / "secrets.json").exists()


async def test_a_key_of_the_settings_is_changed_there(files: Place) -> None:
    store = await files.open()
    store.give([given("wp-team-" + "s" * 32)])

    for change in (store.revoke("team"), store.rotate("team", 1), store.patch("team", {"debug": True})):
        with pytest.raises(KeyConflict) as caught:
            await change
        assert caught.value.code == "key_from_settings"


async def test_an_admin_key_of_the_settings_counts_as_one(files: Place) -> None:
    store = await files.open(admin={"key": "wpa-root-" + "s" * 32})
    record, _ = await store.create("admin", name="a")

    assert (await store.revoke(record.id)).revoked
    assert await store.create_first("admin", name="first") is None


@pytest.mark.parametrize("text", ["", "secret", "wpa-team-" + "s" * 32, "wp-team-short", "wp-é-" + "s" * 32])
async def test_a_given_key_that_is_none_is_refused_without_repeating_it(files: Place, text: str) -> None:
    good = "wp-good-" + "s" * 32
    store = await files.open()
    store.give([given(good)])

    with pytest.raises(KeyStoreError, match="wp-ID-SECRET") as caught:
        store.give([given(text)])

    assert not text or text not in str(caught.value)
    assert files.who(store, good) is not None


async def test_two_given_keys_with_one_id_are_refused(files: Place) -> None:
    store = await files.open()

    with pytest.raises(KeyStoreError, match="another one with the id team"):
        store.give([given("wp-team-" + "s" * 32), given("wp-team-" + "t" * 32)])


# --- files


async def test_neither_file_holds_the_text_and_both_are_for_the_owner_only(files: Place) -> None:
    _, text = await (await files.open()).create("client", name="a")

    assert list(files.modes) == ["keys.json", "secrets.json", "state"]
    assert set(files.modes.values()) == {0o600, 0o700}
    assert files.modes["state"] == 0o700
    assert not any(text.rsplit("-", 1)[1] in files.read(name) for name in ("keys.json", "secrets.json"))


async def test_records_without_their_pepper_are_an_error(files: Place) -> None:
    await (await files.open()).create("client", name="a")
    (files.settings["state_dir"] / "secrets.json").unlink()

    with pytest.raises(KeyStoreError, match=r"secrets\.json is missing"):
        await files.open()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("keys.json", "{"),
        ("keys.json", '{"v": 1, "keys": []}'),
        ("keys.json", '{"v": 2, "revision": 1, "mac": "", "keys": [{"id": "a"}]}'),
        ("secrets.json", "{}"),
        ("secrets.json", '{"pepper": "zz", "fleet_secret": "00"}'),
        ("secrets.json", '{"pepper": "00", "fleet_secret": "00"}'),
    ],
)
async def test_a_broken_file_is_named(files: Place, name: str, content: str) -> None:
    files.write("secrets.json", json.dumps({"pepper": PEPPER, "fleet_secret": FLEET_SECRET}))
    files.write(name, content)

    with pytest.raises(KeyStoreError, match=name.replace(".", r"\.")):
        await files.open()


async def test_a_record_that_somebody_widened_is_not_believed(files: Place) -> None:
    await (await files.open()).create("client", name="a", tenant="blue")
    files.write("keys.json", files.read("keys.json").replace('"blue"', '"red"'))

    with pytest.raises(KeyStoreError, match="changed since"):
        await files.open()


async def test_a_change_that_cannot_be_written_does_not_count(files: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await files.open()
    record, text = await store.create("client", name="a")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(KeyStoreError, match="No space left"):
        await store.revoke(record.id)

    assert files.who(store, text) == record
    assert list(files.modes) == ["keys.json", "secrets.json", "state"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(KeyStoreError, match="file"):
        FileStorage(tmp_path / "file" / "state")


# --- Redis


async def test_another_gateways_changes_are_seen(shared: Place) -> None:
    one, other = await shared.open(), await shared.open()
    record, text = await one.create("client", name="a")

    async with other.following():
        await eventually(lambda: shared.who(other, text) is not None)
        await one.revoke(record.id)
        await eventually(lambda: shared.who(other, text) is None, within_s=30)


async def test_gateways_that_change_at_once_keep_each_others_changes(shared: Place) -> None:
    stores = [await shared.open() for _ in range(4)]

    made = await asyncio.gather(
        *(store.create("client", name=f"k{number}-{turn}") for number, store in enumerate(stores) for turn in range(5))
    )

    known = {record.id for record in (await shared.open()).ring.records()}
    assert known == {record.id for record, _ in made}
    assert len(known) == 20


async def test_two_keys_of_one_name_are_the_most_whoever_makes_them(shared: Place) -> None:
    stores = [await shared.open() for _ in range(4)]

    ends = await asyncio.gather(*(store.create("client", name="a") for store in stores), return_exceptions=True)

    assert len([end for end in ends if isinstance(end, KeyConflict)]) == 2


async def test_redis_holds_nothing_that_opens(shared: Place) -> None:
    _, text = await (await shared.open()).create("client", name="a")

    with redis_client(shared) as client:
        held = b"".join(b"".join(client.hgetall(key).values()) for key in client.scan_iter())
    assert text.encode() not in held
    assert text.rsplit("-", 1)[1].encode() not in held
    for secret in (PEPPER, FLEET_SECRET):
        assert secret.encode() not in held
        assert bytes.fromhex(secret) not in held


async def test_without_redis_the_known_keys_serve_on_and_changes_are_refused(tmp_path: Path) -> None:
    with redis_server() as server:
        async with redis_place(tmp_path, server) as place:
            store = await place.open()
            record, text = await store.create("client", name="a")
            server.kill()

            with pytest.raises(KeyStoreError, match="Redis cannot be used"):
                await store.revoke(record.id)
            await store.refresh()

            assert "Redis" in str(store.fault)
            assert place.who(store, text) == record
            assert place.who(store, "wp-abcdefghij-" + "x" * 43) is None
            with pytest.raises(KeyStoreError):
                await place.open()

            server.start()  # and has lost everything
            await store.refresh()
            assert store.fault is None
            assert place.who(await place.open(), text) == record


async def test_a_redis_that_hangs_is_given_up(tmp_path: Path) -> None:
    with redis_server() as server:
        async with redis_place(tmp_path, server) as place:
            store = await place.open()
            server.pause()
            with pytest.raises(KeyStoreError):
                await store.create("client", name="a")
            server.resume()

            await store.create("client", name="b")


async def test_a_revocation_that_redis_lost_is_made_again(shared: Place) -> None:
    store, other = await shared.open(), await shared.open()
    record, text = await store.create("client", name="a")
    with redis_client(shared) as client:
        before = client.hgetall("warmpath:keys")
        await store.revoke(record.id)
        client.hset("warmpath:keys", mapping=before)  # a failover to a replica that had not heard of it
    await other.refresh()
    kept, _ = await other.create("client", name="b")  # a second history, as long as the first

    await store.refresh()
    await other.refresh()

    for gateway in (store, other, await shared.open()):
        assert shared.who(gateway, text) is None
        assert gateway.ring.get(kept.id) is not None


@pytest.mark.parametrize("junk", [b"", b"{}", b"\xff" * 100, b'{"v": 2, "revision": 99, "mac": "", "keys": []}'])
async def test_what_somebody_else_wrote_to_redis_is_not_believed(shared: Place, junk: bytes) -> None:
    store = await shared.open()
    record, text = await store.create("client", name="a")

    with redis_client(shared) as client:
        client.hset("warmpath:keys", mapping={"version": "x", "document": junk})
    await store.refresh()

    assert store.fault is not None
    assert shared.who(store, text) == record
    with pytest.raises(KeyStoreError):
        await store.create("client", name="b")


async def test_a_key_of_another_type_is_a_fault_like_any(shared: Place) -> None:
    store = await shared.open()
    with redis_client(shared) as client:
        client.delete("warmpath:keys")
        client.set("warmpath:keys", "x")

    with pytest.raises(KeyStoreError, match="ResponseError"):
        await store.create("client", name="a")


def test_a_url_that_is_none_is_refused_without_its_password() -> None:
    with pytest.raises(KeyStoreError) as caught:
        RedisStorage("http://user:s3cret@host")

    assert "s3cret" not in str(caught.value)


def redis_client(place: Place) -> Any:
    assert place.redis is not None
    return Redis.from_url(place.redis.url)
