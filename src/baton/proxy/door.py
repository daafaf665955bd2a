"""Who may come in: API keys, the admin key, and browsers from other origins."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from pathlib import Path

from baton.http import Header, Request
from baton.proxy.errors import ProxyError

_FORWARDED = frozenset((b"authorization", b"traceparent", b"tracestate"))
_RANK = b"x-data-parallel-rank"
_ALLOWED_METHODS = b"GET, POST, OPTIONS"
_PREFLIGHT_SECONDS = b"600"
_EXPOSED = b"x-request-id, x-baton-prefill, x-baton-decode, retry-after"


class Keys:
    """Keys that are known, as digests.

    A key is compared with all of them in constant time, so that neither a right beginning nor its place in the
    list can be read off the clock.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def know(self, request: Request) -> bool:
        """Whether the request carries one of them: ``Authorization: Bearer KEY``, or Anthropic's ``x-api-key``."""
        given = bearer(request) or request.header(b"x-api-key")
        if given is None:
            return False
        digest = _digest(given)
        found = False
        for each in self._digests:
            found |= hmac.compare_digest(digest, each)
        return found


def bearer(request: Request) -> bytes | None:
    """The token of a Bearer authorization."""
    value = request.header(b"authorization")
    if value is None or value[:7].lower() != b"bearer ":
        return None
    return value[7:].strip()


def tenant(request: Request) -> bytes:
    """Who asks: a digest of the key that a client came with, so that no key is kept; empty when it came with none."""
    given = bearer(request) or request.header(b"x-api-key") or request.header(b"authorization")
    return _digest(given) if given else b""


def carried(request: Request, engine_key: bytes | None, own_keys: bool) -> list[Header]:
    """The client's headers that an engine gets: trace context, and an authorization.

    The client's own key is passed on. The engines' key takes its place when the client has none, and when the
    keys that clients show are the proxy's own.

    Args:
        engine_key: what engines ask for, or None.
        own_keys: whether the proxy has checked the client's key itself.
    """
    made, has_key = [], False
    for pair in request.headers:
        if pair[0] in _FORWARDED:
            made.append(pair)
            has_key = has_key or pair[0] == b"authorization"
    if engine_key is not None and (own_keys or not has_key):
        made = [pair for pair in made if pair[0] != b"authorization"]
        made.append((b"authorization", b"Bearer " + engine_key))
    elif not has_key and (key := request.header(b"x-api-key")) is not None:
        # Anthropic's clients say it so; engines know only the other way.
        made.append((b"authorization", b"Bearer " + key))
    return made


def decode_rank(request: Request) -> list[Header]:
    """The header by which a client names the data parallel rank that is to decode, for the decode leg alone.

    An engine would take no notice of what is no number (vllm 0.32, entrypoints/generate/base/serving.py).

    Raises:
        ProxyError: 400, it is no whole number.
    """
    value = request.header(_RANK)
    if value is None:
        return []
    if not value.isdigit():
        shown = value[:40].decode("latin-1")
        raise ProxyError(400, f"X-data-parallel-rank {shown!r} is not a whole number of 0 or more")
    return [(_RANK, value)]


def check_rank(headers: Iterable[Header], ranks: int | None) -> None:
    """Refuse a data parallel rank that the decode server does not have while nothing has been computed for it yet.

    Args:
        headers: of the decode leg alone.
        ranks: that the decode server has; None when nobody knows, and it is left to it.

    Raises:
        ProxyError: 400, it is beyond them.
    """
    named = next((value for name, value in headers if name == _RANK), None)
    if named is None or ranks is None:
        return
    # So many digits are no rank, and would be slow to read.
    if len(named) > 9 or int(named) >= ranks:
        shown, has = named[:40].decode("latin-1"), "1 rank, 0" if ranks == 1 else f"{ranks} ranks, 0 to {ranks - 1}"
        raise ProxyError(400, f"X-data-parallel-rank {shown} is beyond the decode server's: it has {has}")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def read_keys(path: Path) -> list[str]:
    """The keys in a file, one a line; blank lines and those with # in front don't count.

    Raises:
        OSError: it cannot be read.
        ValueError: there is no key in it.
    """
    lines = (line.strip() for line in path.read_text().splitlines())
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"there is no key in {path}")
    return keys


class Origins:
    """The web origins whose pages may call (CORS).

    Args:
        allowed: such as ``https://chat.example``; ``*`` for all.
    """

    def __init__(self, allowed: Sequence[str]) -> None:
        self._all = "*" in allowed
        self._allowed = frozenset(each.rstrip("/").encode() for each in allowed)

    def __bool__(self) -> bool:
        return self._all or bool(self._allowed)

    def headers(self, request: Request) -> list[Header]:
        """What an answer carries so that the page may read it; empty for an origin that may not."""
        origin = request.header(b"origin")
        if origin is None or not (self._all or origin in self._allowed):
            return []
        shown = b"*" if self._all else origin
        return [
            (b"access-control-allow-origin", shown),
            (b"access-control-expose-headers", _EXPOSED),
            *([] if self._all else [(b"vary", b"origin")]),
        ]

    def preflight(self, request: Request) -> list[Header] | None:
        """The answer's headers when *request* is a browser's question whether it may ask; None when it is none."""
        if request.method != "OPTIONS" or request.header(b"access-control-request-method") is None:
            return None
        headers = self.headers(request)
        if headers:
            wanted = request.header(b"access-control-request-headers") or b"authorization, content-type"
            headers += [
                (b"access-control-allow-methods", _ALLOWED_METHODS),
                (b"access-control-allow-headers", wanted),
                (b"access-control-max-age", _PREFLIGHT_SECONDS),
            ]
        return headers
