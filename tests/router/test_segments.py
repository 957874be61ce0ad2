"""The segment cache against plain models of what it does."""

from __future__ import annotations

import threading
from collections import OrderedDict, UserDict
from collections.abc import Callable, ItemsView, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.segments import SegmentCache, Segments, entry_bytes, longest_match

WORDS = st.lists(st.text("ab<|", min_size=1, max_size=5), min_size=1, max_size=8, unique=True)


def as_ids(text: str) -> bytes:
    """A stand-in for a tokenizer: one id a character."""
    return text.encode("utf-32-le")


class Encoder:
    """Counts what reaches the tokenizer."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, texts: Sequence[str]) -> list[bytes]:
        self.seen += texts
        return [as_ids(text) for text in texts]


def leftmost_longest(words: Sequence[str], text: str) -> list[str]:
    """Texts and words in turn, found the slow and obvious way."""
    pieces, start, position = [], 0, 0
    while position < len(text):
        starting = [word for word in words if text.startswith(word, position)]
        if starting:
            word = max(starting, key=len)
            pieces += [text[start:position], word]
            start = position = position + len(word)
        else:
            position += 1
    return [*pieces, text[start:]]


@settings(deadline=None)
@given(words=WORDS, text=st.text("ab<|", max_size=40))
def test_the_leftmost_and_longest_words_are_found(words: list[str], text: str) -> None:
    assert longest_match(words).split(text) == leftmost_longest(words, text)


def test_no_cut_is_where_a_longer_token_may_have_begun() -> None:
    segments = Segments({"ab": b"1", "b": b"2", "cd": b"3"}, lambda texts: [b"" for _ in texts], 0)

    assert segments.cuts == ("ab", "cd")


def test_characters_with_a_meaning_in_patterns_are_plain_characters() -> None:
    assert longest_match([".*", "[a]", "\\"]).split("a.*b[a]\\") == ["a", ".*", "b", "[a]", "", "\\", ""]


@settings(deadline=None)
@given(
    words=WORDS,
    texts=st.lists(st.text("ab<|é", max_size=30), max_size=8),
    max_bytes=st.sampled_from([0, 500, 1_000_000]),
)
def test_ids_are_those_of_the_parts_cold_and_warm_and_under_eviction(
    words: list[str], texts: list[str], max_bytes: int
) -> None:
    tokens = {word: number.to_bytes(4, "little") for number, word in enumerate(words, start=1 << 24)}
    segments = Segments(tokens, Encoder(), max_bytes)

    for text in [*texts, *texts]:
        expected = b"".join(tokens.get(piece, as_ids(piece)) for piece in leftmost_longest(words, text))
        assert segments.encode(text) == expected


def test_a_repeated_conversation_costs_only_its_new_message() -> None:
    encoder = Encoder()
    segments = Segments({"<|end|>": bytes(4)}, encoder, 1 << 20)
    segments.encode("you help<|end|>hello<|end|>hi there<|end|>")
    encoder.seen.clear()

    segments.encode("you help<|end|>hello<|end|>hi there<|end|>and now?<|end|>")

    assert encoder.seen == ["and now?"]


def test_equal_parts_of_one_prompt_are_tokenized_once() -> None:
    encoder = Encoder()

    Segments({"|": bytes(4)}, encoder, 1 << 20).encode("same|same|same")

    assert encoder.seen == ["same"]


def test_what_the_tokenizer_refuses_is_not_remembered() -> None:
    class RefuseOnceError(Exception):
        pass

    def refuse_first(texts: Sequence[str]) -> list[bytes]:
        calls.append(len(texts))
        if len(calls) == 1:
            raise RefuseOnceError
        return [as_ids(text) for text in texts]

    calls: list[int] = []
    segments = Segments({"|": bytes(4)}, refuse_first, 1 << 20)
    with pytest.raises(RefuseOnceError):
        segments.encode("a|b")

    assert segments.encode("a|b") == as_ids("a") + bytes(4) + as_ids("b")


class ModelCache:
    """Least recently used first out, written without thought of speed."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.entries: OrderedDict[str, bytes] = OrderedDict()

    @property
    def size_bytes(self) -> int:
        return sum(entry_bytes(text, ids) for text, ids in self.entries.items())

    def remember(self, used: dict[str, bytes]) -> None:
        for text, ids in used.items():
            if entry_bytes(text, ids) <= self.max_bytes:
                self.entries.pop(text, None)
                self.entries[text] = ids
        while self.size_bytes > self.max_bytes:
            self.entries.popitem(last=False)


@settings(deadline=None)
@given(
    rounds=st.lists(st.dictionaries(st.text("abé日", max_size=40), st.binary(max_size=200), max_size=4), max_size=12),
    max_bytes=st.integers(0, 2000),
)
def test_the_oldest_go_first_and_every_byte_is_accounted_for(rounds: list[dict[str, bytes]], max_bytes: int) -> None:
    cache, model = SegmentCache(max_bytes), ModelCache(max_bytes)
    ids_of: dict[str, bytes] = {}  # an entry's ids are a function of its text

    for used in rounds:
        used = {text: ids_of.setdefault(text, ids) for text, ids in used.items()}
        cache.remember(used)
        model.remember(used)

        assert cache.size_bytes == model.size_bytes <= max_bytes
        assert len(cache) == len(model.entries)
        assert all(cache.get(text) == model.entries.get(text) for text in ids_of)


def test_an_entry_larger_than_the_bound_pushes_nothing_out() -> None:
    cache = SegmentCache(1000)
    cache.remember({"small": bytes(4)})

    cache.remember({"large": bytes(2000)})

    assert cache.get("small") == bytes(4)
    assert cache.get("large") is None


class Interrupted(UserDict[str, bytes]):
    """Another thread gets its turn while these entries are written."""

    def __init__(self, entries: dict[str, bytes], meanwhile: Callable[[], None]) -> None:
        super().__init__(entries)
        self._meanwhile = meanwhile

    def items(self) -> ItemsView[str, bytes]:
        self._meanwhile()
        return super().items()


def test_only_one_thread_writes_and_the_others_go_without() -> None:
    cache = SegmentCache(10_000)
    cache.remember(Interrupted({"first": b"1"}, lambda: cache.remember({"second": b"2"})))

    assert (cache.get("first"), cache.get("second")) == (b"1", None)
    cache.remember({"second": b"2"})
    assert cache.get("second") == b"2"


def test_a_failed_write_does_not_keep_others_from_writing() -> None:
    def fail() -> None:
        raise MemoryError

    cache = SegmentCache(10_000)
    with pytest.raises(MemoryError):
        cache.remember(Interrupted({"first": b"1"}, fail))

    cache.remember({"second": b"2"})

    assert cache.get("second") == b"2"


def test_threads_share_a_cache_without_wrong_ids_or_lost_bytes() -> None:
    segments = Segments({"|": bytes(4)}, Encoder(), 3000)
    texts = ["|".join(f"segment {start + step}" for step in range(6)) for start in range(40)]
    expected = {text: bytes(4).join(as_ids(part) for part in text.split("|")) for text in texts}
    wrong: list[str] = []

    def encode_all(offset: int) -> None:
        for step in range(400):
            text = texts[(offset * 7 + step * 3) % len(texts)]
            if segments.encode(text) != expected[text]:
                wrong.append(text)

    threads = [threading.Thread(target=encode_all, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    cache = segments._cache
    assert not wrong
    assert cache.size_bytes == sum(entry.size_bytes for entry in cache._entries.values()) <= cache.max_bytes
    segments.encode("written once all threads are gone")
    assert cache.get("written once all threads are gone") is not None
