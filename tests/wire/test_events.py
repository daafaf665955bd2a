"""Server-sent events, however the bytes are cut."""

from __future__ import annotations

import pytest

from baton.http import EventBuffer, data_of, last_of, split, with_data

EVENTS = [
    b"data: a\n\n",
    b"event: x\r\ndata: two\r\ndata: lines\r\n\r\n",
    b": a comment\n\n",
    "data: caf\u00e9 \U0001f600\n\n".encode(),
    b"data: mixed\r\n\n",
    b"data: [DONE]\n\n",
]
STREAM = b"".join(EVENTS)


def runs(pieces: list[bytes]) -> list[bytes]:
    buffer = EventBuffer()
    made = [run for piece in pieces if (run := buffer.push(piece))]
    assert buffer.rest == b""
    return made


@pytest.mark.parametrize("size", range(1, 20))
def test_pieces_of_any_size_give_whole_events_and_every_byte(size: int) -> None:
    made = runs([STREAM[at : at + size] for at in range(0, len(STREAM), size)])
    assert b"".join(made) == STREAM
    assert [event for run in made for event in split(run)] == EVENTS


@pytest.mark.parametrize("cut", range(1, len(STREAM)))
def test_a_cut_at_any_byte_holds_back_only_the_event_it_falls_into(cut: int) -> None:
    buffer = EventBuffer()
    first = buffer.push(STREAM[:cut])
    whole = [event for at, event in enumerate(EVENTS) if len(b"".join(EVENTS[: at + 1])) <= cut]
    assert first == b"".join(whole)
    assert buffer.rest == STREAM[len(first) : cut]
    assert first + buffer.push(STREAM[cut:]) == STREAM


def test_an_event_under_way_is_the_rest() -> None:
    buffer = EventBuffer()
    assert buffer.push(b"data: a\n\ndata: b\n") == b"data: a\n\n"
    assert buffer.push(b"data: c") == b""
    assert buffer.rest == b"data: b\ndata: c"


def test_the_last_event_is_found_whatever_ends_the_lines() -> None:
    assert last_of(b"") == b""
    for count in range(1, len(EVENTS) + 1):
        run = b"".join(EVENTS[:count])
        assert last_of(run) == EVENTS[count - 1]
        assert list(split(run)) == EVENTS[:count]


def test_data_is_its_lines_joined() -> None:
    assert [data_of(event) for event in EVENTS[:3]] == [b"a", b"two\nlines", b""]
    assert data_of(b"data:tight\n\n") == b"tight"


def test_new_data_keeps_what_else_the_event_says() -> None:
    assert with_data(EVENTS[1], b"{}") == b"event: x\ndata: {}\n\n"
