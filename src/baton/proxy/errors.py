"""Every answer that is not the engine's own, in the error shape of the API that was called."""

from __future__ import annotations

from typing import Any

import orjson

from baton.cluster import Role
from baton.http import Header
from baton.proxy.legs import Style

JSON: Header = (b"content-type", b"application/json")
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    502: "engine_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
# Anthropic's clients know these and no others.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class Fault(Exception):
    """What ends one attempt at a request.

    Attributes:
        at: the role of the engine that it is of; None when it is of none.
    """

    at: Role | None = None


class ProxyError(Fault):
    """An answer in place of the engine's.

    Attributes:
        status: the HTTP status.
        message: for the client; names no host.
        param: the field of the body at fault.
        retry_after: seconds after which another try makes sense.
        allow: the methods that the path has.
        retry: whether another instance may do it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        retry_after: int | None = None,
        allow: str | None = None,
        retry: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.allow = allow
        self.retry = retry

    def body(self, style: Style = Style.OPENAI) -> bytes:
        return orjson.dumps(error_object(self.status, self.message, self.param, style))

    def headers(self) -> list[Header]:
        made: list[Header] = []
        if self.retry_after is not None:
            made.append((b"retry-after", b"%d" % self.retry_after))
        if self.allow is not None:
            made.append((b"allow", self.allow.encode()))
        if self.status == 401:
            made.append((b"www-authenticate", b"Bearer"))
        return made

    def event(self, style: Style = Style.OPENAI) -> bytes:
        """The same as a server-sent event, for a stream whose head is gone already."""
        return error_event(self.body(style), style)


class StreamFailed(Fault):
    """A stream that its engine ended with an error.

    Attributes:
        body: the error, in JSON.
    """

    def __init__(self, body: bytes) -> None:
        super().__init__("the engine ended its stream with an error")
        self.body = body

    @property
    def code(self) -> int:
        """The HTTP status that the error names; 500 when it names none."""
        try:
            said = orjson.loads(self.body)
            code = said["error"]["code"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return 500
        return code if isinstance(code, int) and 400 <= code < 600 else 500


def error_event(body: bytes, style: Style) -> bytes:
    """An error's body (JSON in one line) as the last event of a stream, as the API's clients expect it."""
    name = b"" if style is Style.OPENAI else b"event: error\n"
    return name + b"data: " + body.replace(b"\n", b" ") + b"\n\n"


def error_object(status: int, message: str, param: str | None = None, style: Style = Style.OPENAI) -> dict[str, Any]:
    if style is Style.ANTHROPIC:
        kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "internal_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}
