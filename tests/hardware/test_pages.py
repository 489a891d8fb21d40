import numpy as np

from duo_ray.hardware.pages import collapse_pages, dense_mappings

SMAPS = """\
7f0000000000-7f0000800000 rw-p 00000000 00:00 0
Size:               8192 kB
Rss:                8192 kB
AnonHugePages:         0 kB
7f0001000000-7f0001800000 rw-p 00000000 00:00 0                          [heap]
Size:               8192 kB
Rss:                8192 kB
7f0002000000-7f0002800000 rw-p 00000000 00:00 0
Size:               8192 kB
Rss:                4096 kB
7f0003000000-7f0003800000 r--p 00000000 08:01 1234                       /models/draft.gguf
Size:               8192 kB
Rss:                8192 kB
7f0004000000-7f0004001000 rw-p 00000000 00:00 0
Size:                  4 kB
Rss:                   4 kB
"""


def test_only_large_anonymous_mappings_that_are_in_memory_are_taken() -> None:
    assert list(dense_mappings(SMAPS.splitlines())) == [(0x7F0000000000, 0x7F0000800000)]


def test_what_is_in_memory_stays_as_it_is() -> None:
    values = np.arange(8 * 2**20, dtype=np.float64)
    collapse_pages()  # elsewhere than on Linux, and where no huge page is free, nothing happens
    assert (values == np.arange(8 * 2**20)).all()
