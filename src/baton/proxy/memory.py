"""How this process handles its memory, once all that stays is made."""

from __future__ import annotations

import ctypes
import gc

# glibc's names (malloc.h)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 64 << 20
MAPPED_BYTES = 32 << 20  # the most that glibc takes


def settle_memory() -> None:
    """Look for garbage less often and not at what stays; keep freed memory for the next request.

    A request makes hundreds of objects and next to no cycles: to search them for some after every 700 is a tenth of
    the work. And a body of more than 128 KB comes from the kernel page by page, and goes back with the answer, unless
    malloc is told to keep it: for a prompt of 220 KB that was most of the work.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, MAPPED_BYTES)
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
