"""What a process does with its memory: a heap on huge pages, freed memory kept, and few collections.

A request touches objects all over a heap of tens of megabytes. In pages of 4 KB those are more than a processor's table of
translations (TLB) holds, and each miss costs time, in a virtual machine several times as much: with huge pages the same code
takes a seventh less CPU for a request and a quarter less for a relayed chunk (docs/gateway.md).

`lay_out_heap` comes before anything of size is imported, so this module imports next to nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["advise_huge_pages", "keep_freed_memory", "lay_out_heap", "spare_collections"]

_SWITCH: Final = "WARMPATH_HUGE_PAGES"
_THP: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_HUGE_BYTES: Final = 2 << 20
"""Of a huge page of x86-64, and of arm64 with pages of 4 KB."""
_HEAP_BYTES: Final = 48 << 20
"""For small objects. 16 MB gave half of the gain, 96 MB no more."""
_MADV_HUGEPAGE: Final = 14
_MADV_COLLAPSE: Final = 25
"""Linux 6.1; with older ones the kernel's own thread does it in a minute."""

_OBJECT_BYTES: Final = 450
"""CPython takes memory for objects up to 512 bytes in arenas of 1 MiB,"""
_OBJECTS_PER_ARENA: Final = 2_112
"""of which one holds so many of such bytes objects at most (64 pools of 16 KiB, 496 bytes each)."""

_MALLOC_OPTIONS: Final = {-3: 16 << 20, -1: 64 << 20, -2: 32 << 20}
"""glibc's M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_TOP_PAD, in bytes."""

_libc: Final = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_pins: Final[list[bytes]] = []


def lay_out_heap() -> None:
    """Have the memory for small objects in one piece and on huge pages. Where there are none nothing is done.

    An arena is half of a huge page and lies wherever the kernel has a megabyte free, between libraries; many lie side
    by side. Of each an object is kept, since one without any is given back; the others make room for what comes.
    ``WARMPATH_HUGE_PAGES=off`` leaves all as it is.
    """
    if os.environ.get(_SWITCH) == "off" or not _are_there():
        return
    keep_freed_memory()
    _libc.free(ctypes.c_void_p(_libc.malloc(ctypes.c_size_t(_HUGE_BYTES))))  # which leaves M_TOP_PAD behind it
    count = _HEAP_BYTES // (1 << 20) * _OBJECTS_PER_ARENA
    objects = [bytes(_OBJECT_BYTES) for _ in range(count)]
    _pins.extend(objects[:: _OBJECTS_PER_ARENA // 2])
    for start, end in _memory("", "[heap]"):
        _madvise(start, end - start, _MADV_HUGEPAGE)
        for page in range(start, end, _HUGE_BYTES):
            _madvise(page, _HUGE_BYTES, _MADV_COLLAPSE)


def advise_huge_pages() -> None:
    """Ask for them for what malloc's heap has grown by, as an index makes it. The kernel's own thread makes them. Not for all
    memory: of a thread's stack, most of which is never touched, a huge page would be resident as a whole.
    """
    if _pins:
        for start, end in _memory("[heap]"):
            _madvise(start, end - start, _MADV_HUGEPAGE)


def keep_freed_memory() -> None:
    """Bodies come and go, and what one leaves is what the next one needs. By itself glibc gives it back to the kernel each time
    and takes it anew, page by page: 19 page faults and 70 us for a body of 256 KB. It may keep 64 MiB. Elsewhere than with
    glibc nothing is changed.
    """
    with contextlib.suppress(AttributeError):
        mallopt = _libc.mallopt
        for option, size_bytes in _MALLOC_OPTIONS.items():
            mallopt(option, size_bytes)


def spare_collections() -> None:
    """What the start made is never garbage, and the index grows to millions of numbers that a full collection would visit, for
    tens of milliseconds each time. Cycles are few here and young when they die, so the small collections find them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 1_000)


def _are_there() -> bool:
    try:
        return "[never]" not in _THP.read_text()
    except OSError:
        return False


def _memory(*names: str) -> Iterator[tuple[int, int]]:
    """Private memory that no file is behind, by its names, as far as huge pages fit into it: (start, end)."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, mode, _, _, inode, *name = line.split()
        if mode != "rw-p" or inode != "0" or "".join(name) not in names:
            continue
        start, end = (int(each, 16) for each in place.split("-"))
        start, end = -(-start // _HUGE_BYTES) * _HUGE_BYTES, end // _HUGE_BYTES * _HUGE_BYTES
        if start < end:
            yield start, end


def _madvise(start: int, size: int, advice: int) -> None:
    """An advice: that it is not taken is no failure."""
    _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)
