"""The side channel answers handshakes and questions, and outlives whatever it is sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")
zmq = pytest.importorskip("zmq")

from baton.engine import side_channel  # noqa: E402
from baton.engine.held import Claim, Held, digest  # noqa: E402
from baton.engine.side_channel import Asker, answer, listen  # noqa: E402
from tests.ports import free_ports  # noqa: E402

METADATA = {(0, 0): b"payload"}
CLAIM = Claim("r", [[1, 2]], 40, digest(range(40), ""))


@pytest.fixture
def port() -> Iterator[int]:
    """Where an engine listens that holds what CLAIM says."""
    held, ready, stop = Held(), threading.Event(), threading.Event()
    held.keep("r", ([1, 2],), range(40), "")
    (port,) = free_ports(1)
    thread = threading.Thread(target=listen, args=(METADATA, held, ready, stop, "127.0.0.1", port))
    thread.start()
    assert ready.wait(20)
    yield port
    stop.set()
    thread.join(20)
    assert not thread.is_alive()


def ask(message: bytes) -> list[bytes] | None:
    return answer([b"me", b"", message], METADATA, Held())


def test_a_handshake_gets_the_metadata_of_its_rank() -> None:
    reply = ask(msgspec.msgpack.encode((side_channel.GET_META_MSG, 0, 0)))
    assert reply is not None
    assert reply[:3] == [b"me", b"", b"payload"]
    assert isinstance(msgspec.msgpack.decode(reply[3]), float)


@pytest.mark.parametrize("rank", [(0, 1), (7, 0), ("0", 0), (0,), (), (0, 0, 0), ([], {})], ids=str)
def test_a_rank_that_is_not_there_gets_an_empty_payload(rank: tuple[object, ...]) -> None:
    """vLLM's listener ends with a KeyError, and with it every handshake to come."""
    reply = ask(msgspec.msgpack.encode((side_channel.GET_META_MSG, *rank)))
    assert reply is not None
    assert reply[:3] == [b"me", b"", b""]


@given(st.lists(st.binary(max_size=20), max_size=4))
def test_no_message_is_too_much(parts: list[bytes]) -> None:
    answer(parts, METADATA, Held())


@given(st.recursive(st.none() | st.integers(-9, 9) | st.binary(), st.lists, max_leaves=6))
def test_no_readable_message_is_too_much(value: object) -> None:
    ask(msgspec.msgpack.encode(value))


def test_claims_are_asked_over_the_wire(port: int) -> None:
    asker = Asker()
    assert asker.problem("127.0.0.1", port, CLAIM) is None
    other = Claim("r", [[1, 3]], 40, None)
    assert asker.problem("127.0.0.1", port, other) == "those are not the blocks of that request"
    asker.close()


def test_a_stock_engine_cannot_say(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """To it the question is a wish for the metadata of rank (0, 0), which it fulfils."""
    monkeypatch.setattr(side_channel, "MARK", b"baton of another time:")
    monkeypatch.setattr(side_channel, "answer", lambda parts, *_: [parts[0], b"", b"payload", b"\x00"])
    asker = Asker()
    assert asker.problem("127.0.0.1", port, CLAIM) is None
    asker.close()


def test_who_does_not_answer_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_channel, "ASK_SECONDS", 0.2)
    (port,) = free_ports(1)
    asker = Asker()
    assert asker.problem("127.0.0.1", port, CLAIM) == f"no answer from 127.0.0.1:{port} within 0.2 s"
    problem = asker.problem("no such host", port, CLAIM)
    assert problem is not None
    asker.close()
