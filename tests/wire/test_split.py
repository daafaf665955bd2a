"""Generated messages, cut anywhere: what is understood never hangs on where one read ends and the next begins."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.http import Limits
from tests.wire.corpus import REQUESTS, RESPONSES
from tests.wire.drive import Call, Desk


@pytest.fixture(autouse=True)
def loop_kind() -> None:
    """No loop runs here: once is enough."""


# The same examples each time, so that a run in CI can be run again.
steady = settings(max_examples=250, derandomize=True, deadline=None, database=None)

LINE = st.text("abcXYZ019-_./", min_size=1, max_size=12).map(str.encode)
VALUE = st.text('abc XYZ\t:,;="019é', max_size=20).map(lambda text: text.strip().encode())
HEADERS = st.lists(st.tuples(LINE.map(lambda name: b"X-" + name.replace(b"/", b"")), VALUE), max_size=4)
BODY = st.binary(max_size=60)
SIZES = st.lists(st.integers(1, 9), max_size=12)
EXTENSIONS = st.sampled_from([b"", b";a", b";a=b", b';a="b c"'])


def in_chunks(body: bytes, sizes: list[int], extension: bytes, trailers: list[tuple[bytes, bytes]]) -> bytes:
    """*body* in chunks of these sizes, the rest in one more."""
    made = b""
    for size in [*sizes, len(body)]:
        piece, body = body[:size], body[size:]
        if piece:
            made += b"%X%b\r\n%b\r\n" % (len(piece), extension, piece)
    return made + b"0%b\r\n" % extension + b"".join(b"%b: %b\r\n" % pair for pair in trailers) + b"\r\n"


def cut(raw: bytes, places: list[int]) -> list[bytes]:
    """*raw* cut at these places, taken modulo its length."""
    at = sorted({place % (len(raw) + 1) for place in places})
    return [raw[start:end] for start, end in zip([0, *at], [*at, len(raw)], strict=True) if end > start]


CUTS = st.lists(st.integers(0, 4000), max_size=12)


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes]]:
    """One request's bytes, and what it says: method, target, headers beside those of framing, body."""
    method = draw(st.sampled_from([b"GET", b"POST", b"PUT", b"HEAD", b"DELETE"]))
    target = b"/" + draw(LINE)
    headers = draw(HEADERS)
    body = draw(BODY)
    blank = draw(st.sampled_from([b"", b" ", b"\t", b"   "]))
    lines = [b"%b %b HTTP/1.1" % (method, target), b"Host:%ba" % blank]
    lines += [b"%b:%b%b%b" % (name, blank, value, blank) for name, value in headers]
    if draw(st.booleans()):
        trailers = [(b"T-" + name, value) for name, value in draw(HEADERS)]
        lines.append(b"Transfer-Encoding: chunked")
        framed = in_chunks(body, draw(SIZES), draw(EXTENSIONS), trailers)
    else:
        lines.append(b"Content-Length: %d" % len(body))
        framed = body
    raw = draw(st.sampled_from([b"", b"\r\n"])) + b"\r\n".join(lines) + b"\r\n\r\n" + framed
    return raw, (method, target, [(name.lower(), value) for name, value in headers], body)


@given(st.lists(requests(), min_size=1, max_size=6), CUTS, st.booleans())
@steady
def test_a_server_reads_the_same_requests_wherever_they_are_cut(
    made: list[tuple[bytes, tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes]]], places: list[int], at_once: bool
) -> None:
    desk = Desk(Limits(pipelined=3))
    raw = b"".join(raw for raw, _ in made)
    desk.feed(cut(raw, places), at_once=at_once)
    seen = [
        (
            each.method.encode(),
            each.target,
            [pair for pair in each.headers if pair[0].startswith(b"x-")],
            each.body,
        )
        for each in desk.seen
    ]
    assert seen == [meant for _, meant in made]
    answers = [b"%b %b %b" % (method, target, body) for method, target, _, body in seen]
    assert bytes(desk.socket.sent) == b"".join(
        b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(answer) + (b"" if answer.startswith(b"HEAD") else answer)
        for answer in answers
    )
    assert not desk.socket.closed


@given(
    st.sampled_from(sorted(set(REQUESTS) - {"endless header"})), st.lists(requests(), max_size=3), CUTS, st.booleans()
)
@steady
def test_a_server_answers_the_whole_corpus_alike_wherever_it_is_cut(
    name: str, before: list[tuple[bytes, object]], places: list[int], at_once: bool
) -> None:
    """Also what it refuses: what came before is answered first."""
    raw = b"".join(raw for raw, _ in before) + REQUESTS[name]
    whole, parts = Desk(), Desk()
    whole.feed([raw])
    parts.feed(cut(raw, places), at_once=at_once)
    assert [each.target for each in parts.seen] == [each.target for each in whole.seen]
    assert without_continue(parts.socket.sent) == without_continue(whole.socket.sent)
    assert (parts.socket.closed, parts.socket.ended) == (whole.socket.closed, whole.socket.ended)


def without_continue(sent: bytearray) -> bytes:
    """A 100 is owed only to a client that still holds its body back."""
    return bytes(sent).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")


@pytest.fixture(scope="module")
def futures() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop that makes futures and never runs."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@st.composite
def responses(draw: st.DrawFn) -> tuple[bytes, int, list[tuple[bytes, bytes]], bytes, bool]:
    """One response's bytes; its status, headers beside those of framing, body; whether the connection goes on."""
    status = draw(st.sampled_from([200, 201, 400, 404, 500, 503]))
    headers = draw(HEADERS)
    body = draw(BODY)
    framing = draw(st.sampled_from(["length", "chunked", "end"]))
    lines = [b"HTTP/1.1 %d Whatever" % status, *(b"%b: %b" % pair for pair in headers)]
    if framing == "chunked":
        lines.append(b"transfer-encoding: chunked")
        trailers = [(b"T-" + name, value) for name, value in draw(HEADERS)]
        framed = in_chunks(body, draw(SIZES), draw(EXTENSIONS), trailers)
    else:
        framed = body
        if framing == "length":
            lines.append(b"content-length: %d" % len(body))
    before = draw(st.sampled_from([b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early\r\nX-Link: a\r\n\r\n"]))
    raw = before + b"\r\n".join(lines) + b"\r\n\r\n" + framed
    return raw, status, [(name.lower(), value) for name, value in headers], body, framing != "end"


@given(made=responses(), places=CUTS)
@steady
def test_a_client_reads_the_same_response_wherever_it_is_cut(
    futures: asyncio.AbstractEventLoop,
    made: tuple[bytes, int, list[tuple[bytes, bytes]], bytes, bool],
    places: list[int],
) -> None:
    raw, status, headers, body, goes_on = made
    call = Call(futures)
    call.feed(cut(raw, places))
    assert (call.body is not None) == goes_on
    assert call.connection.reusable == goes_on
    call.end()
    assert call.error is None
    assert call.response is not None
    assert call.response.status == status
    assert [pair for pair in call.response.headers if pair[0].startswith((b"x-", b"t-"))] == headers
    assert call.body == body


@given(made=responses(), places=CUTS, end=st.integers(0, 4000))
@steady
def test_a_response_that_is_cut_off_anywhere_is_never_whole(
    futures: asyncio.AbstractEventLoop,
    made: tuple[bytes, int, list[tuple[bytes, bytes]], bytes, bool],
    places: list[int],
    end: int,
) -> None:
    raw, _, _, _, has_end = made
    head = raw.rindex(b"HTTP/1.1") if has_end else 0
    call = Call(futures)
    call.feed(cut(raw[: end % len(raw)], places))
    call.end()
    if has_end or end % len(raw) < raw.index(b"\r\n\r\n", head) + 4:
        assert call.body is None
        assert call.error is not None


@given(name=st.sampled_from(sorted(set(RESPONSES) - {"endless header", "huge header"})), places=CUTS)
@steady
def test_a_client_judges_the_whole_corpus_alike_wherever_it_is_cut(
    futures: asyncio.AbstractEventLoop, name: str, places: list[int]
) -> None:
    whole, parts = Call(futures), Call(futures)
    whole.feed([RESPONSES[name]])
    parts.feed(cut(RESPONSES[name], places))
    whole.end()
    parts.end()
    assert parts.body == whole.body
    assert (parts.error is None) == (whole.error is None)
    if whole.response is not None and parts.response is not None:
        assert (parts.response.status, parts.response.headers) == (whole.response.status, whole.response.headers)
