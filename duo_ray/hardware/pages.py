"""Huge pages for weights: every step of a decode reads all of them, and at 4 KiB a page the CPU looks up addresses."""

from __future__ import annotations

import ctypes
import platform
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

_HUGE = 2 * 2**20
_MADV_COLLAPSE = 25
_DENSE = 0.9
"""Share of a mapping that must be in memory: a buffer that fills slowly would be filled at once."""
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0\s*$")


def collapse_pages() -> int:
    """Move what this process has in memory by now into huge pages; returns how many bytes were moved.

    Private anonymous memory only, as malloc gives it for large arrays. Needs no setting and no privilege (Linux 6.1 and
    later, whatever /sys/kernel/mm/transparent_hugepage/enabled says); elsewhere, and where the machine has no free huge
    page, memory stays as it is.
    """
    if platform.system() != "Linux":
        return 0
    libc = ctypes.CDLL(None)
    moved = 0
    for start, end in dense_mappings(Path("/proc/self/smaps").read_text(encoding="ascii").splitlines()):
        for page in range(-(-start // _HUGE) * _HUGE, end - _HUGE + 1, _HUGE):
            if libc.madvise(ctypes.c_void_p(page), ctypes.c_size_t(_HUGE), _MADV_COLLAPSE) == 0:
                moved += _HUGE
    return moved


def dense_mappings(smaps: Iterable[str]) -> Iterator[tuple[int, int]]:
    """(start, end) of the private anonymous mappings of at least 2 MiB that are nearly all in memory.

    Args:
        smaps: lines of /proc/PID/smaps.
    """
    start = end = 0
    for line in smaps:
        if found := _MAPPING.match(line):
            start, end = (int(address, 16) for address in found.groups())
        elif line.startswith("Rss:") and end - start >= _HUGE:
            if int(line.split()[1]) * 1024 >= _DENSE * (end - start):
                yield start, end
            start = end = 0
        elif not line[0].isupper():
            start = end = 0
