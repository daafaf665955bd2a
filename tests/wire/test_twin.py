"""Our two parsers against h11, a strict one in pure Python: one corpus, and every verdict the same but for a table."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import h11
import pytest

from baton.http import Request, Responder
from tests.wire.corpus import REQUESTS, RESPONSES
from tests.wire.drive import Call, Desk

PIECE = 65536  # what one read brings at most
H11_HEAD_BYTES = 256 << 10


@pytest.fixture(autouse=True)
def loop_kind() -> None:
    """No loop runs here: once is enough."""


@dataclass(frozen=True)
class Asked:
    """What a server took for requests, and how it went on.

    Attributes:
        requests: method, target, headers and body of each.
        end: "more" can come, "closed" by the request's wish, or "refused".
    """

    requests: tuple[tuple[bytes, bytes, tuple[tuple[bytes, bytes], ...], bytes], ...]
    end: str


@dataclass(frozen=True)
class Got:
    """What a client took for the response.

    Attributes:
        status, headers, body: None when it is not whole.
        reusable: whether the connection may carry another request.
    """

    status: int | None = None
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    reusable: bool = False


def unframed(headers: Iterable[tuple[bytes, bytes]]) -> tuple[tuple[bytes, bytes], ...]:
    """Without what the body shows by itself."""
    return tuple((name, value) for name, value in headers if name not in (b"content-length", b"transfer-encoding"))


def pieces(raw: bytes) -> list[bytes]:
    return [raw[at : at + PIECE] for at in range(0, len(raw), PIECE)]


def our_server(raw: bytes) -> Asked:
    desk = Desk()
    desk.feed(pieces(raw))
    seen = tuple((each.method.encode(), each.target, unframed(each.headers), each.body) for each in desk.seen)
    if re.search(rb"HTTP/1\.1 [45]", desk.socket.sent):
        return Asked(seen, "refused")
    return Asked(seen, "closed" if desk.socket.closed else "more")


def h11_server(raw: bytes) -> Asked:
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=64 << 10)
    requests: list[tuple[bytes, bytes, tuple[tuple[bytes, bytes], ...], bytes]] = []
    head: h11.Request | None = None
    body = b""
    try:
        for piece in pieces(raw):
            connection.receive_data(piece)
            while True:
                event = connection.next_event()
                if event is h11.NEED_DATA:
                    break
                if event is h11.PAUSED:
                    return Asked(tuple(requests), "closed")
                if isinstance(event, h11.Request):
                    head, body = event, b""
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    assert head is not None
                    requests.append((head.method, head.target, unframed(head.headers), body))
                    connection.send(h11.Response(status_code=404, headers=[("content-length", "0")]))
                    connection.send(h11.EndOfMessage())
                    if connection.our_state is not h11.DONE:
                        return Asked(tuple(requests), "closed")
                    connection.start_next_cycle()
    except h11.RemoteProtocolError:
        return Asked(tuple(requests), "refused")
    return Asked(tuple(requests), "more")


def our_client(raw: bytes, loop: asyncio.AbstractEventLoop) -> Got:
    call = Call(loop)
    call.feed(pieces(raw))
    reusable = call.connection.reusable
    call.end()
    if call.body is None:
        assert call.error is not None, "neither whole nor broken"
        return Got()
    assert call.response is not None
    return Got(call.response.status, unframed(call.response.headers), call.body, reusable)


def h11_client(raw: bytes) -> Got:
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=H11_HEAD_BYTES)
    connection.send(h11.Request(method="GET", target="/", headers=[("host", "a")]))
    connection.send(h11.EndOfMessage())
    head: h11.Response | None = None
    body = b""
    try:
        for piece in [*pieces(raw), b""]:
            connection.receive_data(piece)
            while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                if isinstance(event, h11.Response):
                    head = event
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    assert head is not None
                    nothing_more = piece != b"" and connection.trailing_data == (b"", False)
                    reusable = nothing_more and connection.their_state is h11.DONE
                    return Got(head.status_code, unframed(head.headers), body, reusable)
                elif isinstance(event, h11.ConnectionClosed):
                    return Got()
    except h11.RemoteProtocolError:
        pass
    return Got()


def compare(corpus: dict[str, bytes], ours: Callable[[bytes], object], twins: Callable[[bytes], object]) -> set[str]:
    """The names of those on which the two differ."""
    return {name for name, raw in corpus.items() if ours(raw) != twins(raw)}


def names(table: Mapping[str, Iterable[str]]) -> set[str]:
    return {name for group in table.values() for name in group}


# Each table: a reason, and the messages it is the reason for. A difference that is gone must go from here too.

SERVER_IS_STRICTER = {
    "RFC 9112, 3.2: the star is for OPTIONS, an authority for CONNECT, and a path starts with a slash": (
        "get star",
        "absolute form of another scheme",
        "target without slash",
        "authority form",
    ),
    "no tunnels, and no protocol but HTTP/1.1 and HTTP/1.0": (
        "connect",
        "upgrade",
        "http/2 preface",
        "version 0.9",
        "version 1.2",
        "version 2.0",
    ),
    "the parser knows the registered methods only, and methods are case-sensitive": ("unknown method", "lower method"),
    "junk after a body is no method": ("body with junk after",),
    "RFC 9112, 2.2 lets a server take a bare LF for a line's end, and another may not": (
        "bare LF after the line",
        "bare LF after a header",
        "bare LF everywhere",
        "bare LF at the end",
        "value ending in bare LF",
        "chunked half a CRLF at the end",
    ),
    "RFC 9112, 3.2: a Host that is none is a 400": (
        "host with a path",
        "host with a user",
        "host with a space",
        "host list",
    ),
    "RFC 9110, 10.1.1: what cannot be done is a 417": ("expect something else",),
    "RFC 9112, 6: framing that another could read in another way": (
        "lengths twice",
        "length list",
        "length and chunked",
        "chunked and length",
        "chunked in 1.0",
        "chunked trailer of framing",
    ),
    "RFC 9112, 5.2: a server may refuse folded headers": (
        "space before a later header",
        "folded",
        "folded with a tab",
        "folded to nothing",
        "coding folded",
        "chunked trailer folded",
    ),
    "our limits are for the head as a whole, also when it comes in one piece": (
        "two hundred headers",
        "huge header",
        "huge target",
    ),
    "RFC 9110, 5.5: control characters are not part of a value": tuple(
        f"value {place} {name}" for place in ("with", "ending in") for name in ("SOH", "BEL", "ESC", "DEL")
    ),
    "a number over 64 bits is refused at once": ("length over 64 bits", "chunked over 64 bits"),
    "RFC 9112, 7.1: neither blanks nor control characters stand in a chunk's line": (
        "chunked extension with bare CR",
        "chunked extension with NUL",
        "chunked space after size",
        "chunked tab after size",
    ),
}

SERVER_IS_LAXER = {
    "RFC 9112, 2.2: blank lines before a request are skipped": (
        "get after blank line",
        "get after two blank lines",
        "get after bare LF",
        "body with CRLF after",
        "blank lines only",
    ),
    "RFC 9112, 3 lets a server split the line at any blanks; a target holds none": (
        "two spaces after the method",
        "two spaces before the version",
    ),
    "the parser does not tell these from HTTP/1.0, and they are framed alike": ("version of RTSP", "source of ICE"),
    "leading zeros change no size": ("chunked thirty zeros",),
}

SERVER_IS_OTHERWISE = {
    "RFC 9112, 3.2.2: a whole URL is taken for its path": ("absolute form", "absolute form without path"),
    "h11 does not know keep-alive in HTTP/1.0": ("version 1.0 kept",),
}

CLIENT_IS_STRICTER = {
    "RFC 9112, 6: framing that another could read in another way": (
        "lengths twice",
        "length list",
        "length and chunked",
        "chunked and length",
        "chunked trailer of framing",
    ),
    "the parser knows no such version": ("version 1.2",),
    "engines end lines with CRLF": (
        "bare LF everywhere",
        "bare LF after a header",
        "bare LF after the line",
        "chunked half a CRLF at the end",
    ),
    "engines fold no headers": ("folded", "coding folded", "chunked trailer folded"),
    "RFC 9110, 5.5: control characters are not part of a value": tuple(
        f"value with {name}" for name in ("SOH", "BEL", "ESC", "DEL")
    ),
    "RFC 9112, 7.1: neither blanks nor control characters stand in a chunk's line": (
        "chunked extension with bare CR",
        "chunked extension with NUL",
        "chunked space after size",
        "chunked tab after size",
    ),
}

CLIENT_IS_LAXER = {
    "the reason is read by nobody": ("reason with NUL",),
    "the parser does not tell it from HTTP/1.0, and it is framed alike": ("version of RTSP",),
    "the parser skips blank lines before a response": ("blank line first",),
    "leading zeros change no size": ("chunked thirty zeros",),
}

CLIENT_IS_OTHERWISE = {
    "the parser skips blank lines after a response; anything else ends the connection": ("extra CRLF",),
    "h11 does not know keep-alive in HTTP/1.0": ("1.0 kept",),
    "a connection whose server says another version is not used again": ("version 2.0",),
}


def server_refuses(verdict: Asked) -> bool:
    return verdict.end == "refused"


def test_the_server_judges_requests_as_its_twin_does() -> None:
    assert len(REQUESTS) > 250
    tables = names(SERVER_IS_STRICTER), names(SERVER_IS_LAXER), names(SERVER_IS_OTHERWISE)
    assert compare(REQUESTS, our_server, h11_server) == set().union(*tables)
    stricter, laxer, otherwise = tables
    assert {name for name in stricter if not server_refuses(our_server(REQUESTS[name]))} == set()
    assert {name for name in laxer if not server_refuses(h11_server(REQUESTS[name]))} == set()
    for name in laxer | otherwise:
        assert not server_refuses(our_server(REQUESTS[name])), name


def test_the_client_judges_responses_as_its_twin_does() -> None:
    assert len(RESPONSES) > 150
    loop = asyncio.new_event_loop()
    try:
        ours = {name: our_client(raw, loop) for name, raw in RESPONSES.items()}
    finally:
        loop.close()
    twins = {name: h11_client(raw) for name, raw in RESPONSES.items()}
    stricter, laxer, otherwise = names(CLIENT_IS_STRICTER), names(CLIENT_IS_LAXER), names(CLIENT_IS_OTHERWISE)
    assert {name for name in RESPONSES if ours[name] != twins[name]} == stricter | laxer | otherwise
    assert {name for name in stricter if ours[name] != Got()} == set()
    assert {name for name in laxer if twins[name] != Got()} == set()
    assert {name for name in otherwise if Got() in (ours[name], twins[name])} == set()


@pytest.mark.parametrize("status", [200, 204, 304, 404, 500])
def test_what_our_server_writes_is_read_by_the_twin_and_by_our_client_alike(status: int) -> None:
    desk = Desk()

    async def answer(request: Request, responder: Responder) -> None:
        if status == 200:
            responder.start(status, [(b"x", b"y")])
            responder.write(b"one")
            responder.write(b"two")
            responder.end()
        else:
            responder.send(status, [(b"x", b"y")], b"" if status in (204, 304) else b"onetwo")

    desk.handler = answer  # type: ignore[method-assign]
    desk.feed([REQUESTS["get"]])
    raw = bytes(desk.socket.sent)
    loop = asyncio.new_event_loop()
    try:
        expected = Got(status, ((b"x", b"y"),), b"" if status in (204, 304) else b"onetwo", reusable=True)
        assert our_client(raw, loop) == h11_client(raw) == expected
    finally:
        loop.close()
