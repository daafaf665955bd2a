"""Every answer that is not the engine's own, in OpenAI's error shape."""

from __future__ import annotations

from typing import Any

import orjson

from baton.http import Header

_TYPES = {
    400: "invalid_request_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    502: "engine_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ProxyError(Exception):
    """An answer in place of the engine's.

    Attributes:
        status: the HTTP status.
        message: for the client; names no host.
        param: the field of the body at fault.
        retry_after: seconds after which another try makes sense.
        allow: the methods that the path has.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        retry_after: int | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.allow = allow

    def body(self) -> bytes:
        return orjson.dumps(error_object(self.status, self.message, self.param))

    def headers(self) -> list[Header]:
        made: list[Header] = []
        if self.retry_after is not None:
            made.append((b"retry-after", b"%d" % self.retry_after))
        if self.allow is not None:
            made.append((b"allow", self.allow.encode()))
        return made

    def event(self) -> bytes:
        """The same as a server-sent event, for a stream whose head is gone already."""
        return b"data: " + self.body() + b"\n\n"


def error_object(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "internal_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}
