"""Numbers as people type them in flags, files and variables."""

from __future__ import annotations

import re

MOST_SERVERS = 4096
"""Of one kind, on one host; what one types by mistake is more, and would be planned one by one."""
MOST_RANKS = 4096
"""Of one kind, in one engine."""

_MOST_DIGITS = 18
_SUFFIXED = re.compile(r"([0-9]{1,18})(\.[0-9]{1,18})?([kKmMgGtT])")
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


def decimal(text: str | None) -> int | None:
    """The number that *text* is in ASCII digits, 18 at most; None for any other text.

    ``str.isdigit`` also takes characters such as ``²``, of which ``int`` makes no number.
    """
    plain = text is not None and len(text) <= _MOST_DIGITS and text.isascii() and text.isdigit()
    return int(text) if text is not None and plain else None


def human_size(text: str) -> int | None:
    """A number that may end as vLLM's sizes do (0.32, utils/argparse_utils.py), or None.

    k, m, g and t are powers of 1000 and take a fraction, as in ``25.6k``; K, M, G and T are of 1024 and take none.
    """
    text = text.strip()
    match = _SUFFIXED.fullmatch(text)
    if match is None:
        return decimal(text)
    whole, fraction, suffix = match.groups()
    if suffix.isupper():
        return None if fraction else int(whole) << 10 * _POWERS[suffix.lower()]
    return int(float(whole + (fraction or "")) * 1000 ** _POWERS[suffix])
