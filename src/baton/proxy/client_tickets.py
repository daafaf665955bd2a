"""Tickets that clients may hold: signed, and they say nothing but which turn of the store is meant, and until when.

An engine's own ticket names hosts, ports and blocks, and an engine believes what it says: it stays in the store.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import struct

ID_BYTES = 16
_PAYLOAD = struct.Struct(f"!{ID_BYTES}sd")
_MAC_BYTES = hashlib.sha256().digest_size
_TEXT_LENGTH = -(-(_PAYLOAD.size + _MAC_BYTES) // 3) * 4


class Signer:
    """Signs with a secret of its own (HMAC-SHA256): a ticket is good for the proxy that gave it, until that stops."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def sign(self, number: bytes, expires_at: float) -> str:
        """A ticket in URL-safe base64.

        Args:
            number: of :data:`ID_BYTES` random bytes.
            expires_at: in seconds, on the clock of whoever reads it.
        """
        payload = _PAYLOAD.pack(number, expires_at)
        return base64.urlsafe_b64encode(payload + self._mac(payload)).decode()

    def read(self, text: object) -> tuple[bytes, float] | None:
        """What :meth:`sign` was given; None for anything that it has not made."""
        if not isinstance(text, str) or len(text) != _TEXT_LENGTH:
            return None
        try:
            raw = base64.b64decode(text, altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            return None
        payload, mac = raw[: _PAYLOAD.size], raw[_PAYLOAD.size :]
        if not hmac.compare_digest(mac, self._mac(payload)):
            return None
        number, expires_at = _PAYLOAD.unpack(payload)
        return number, expires_at

    def _mac(self, payload: bytes) -> bytes:
        return hmac.digest(self._secret, payload, "sha256")
