"""The side channel: where engines ask each other for NIXL metadata and, between Baton's, whether blocks are held.

vLLM's listener (0.32, nixl/base_scheduler.py, ``_nixl_handshake_listener``) ends with the first message that it cannot
read or that names a rank which isn't there, and no handshake succeeds from then on. One wrong ``tp_size`` in a ticket
is enough. :func:`listen` answers the same questions and lives on. It can go when vLLM's does too, apart from
:mod:`baton.engine.held`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import zmq_ctx
from vllm.utils.network_utils import make_zmq_path

from baton.engine.held import MARK, YES, Claim, Held, question

logger = logging.getLogger("vllm.baton")

ASK_SECONDS = 5.0
"""How long a reader waits for an answer; without one it does not trust what it has read."""


def listen(
    metadata: Mapping[tuple[int, int], bytes],
    held: Held,
    ready: threading.Event,
    stop: threading.Event,
    *address: Any,
) -> None:
    """Answer until *stop* is set.

    Args:
        metadata: handshake payloads by (pipeline rank, tensor parallel rank).
        ready: is set once it listens.
        address: host and port.
    """
    with zmq_ctx(zmq.ROUTER, make_zmq_path("tcp", *address)) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 1000)
        ready.set()
        while not stop.is_set():
            try:
                parts = socket.recv_multipart()
            except zmq.Again:
                continue
            reply = answer(parts, metadata, held)
            if reply is not None:
                try:
                    socket.send_multipart(reply)
                except zmq.ZMQError as error:
                    logger.warning("side channel: an answer could not be sent: %s", error)


def answer(parts: list[bytes], metadata: Mapping[tuple[int, int], bytes], held: Held) -> list[bytes] | None:
    """What is sent back for one message, or None when it says not even who asks."""
    if len(parts) != 3 or parts[1]:
        return None
    identity, _, raw = parts
    try:
        asked, *rank = msgspec.msgpack.decode(raw)
    except (msgspec.DecodeError, TypeError, ValueError):
        return [identity, b"", b"unreadable"]
    if isinstance(asked, bytes) and asked.startswith(MARK):
        return [identity, b"", held.answer(asked)]
    key = tuple(rank)
    known = asked == GET_META_MSG and all(isinstance(each, int) for each in key) and key in metadata
    if not known:
        logger.warning("side channel: somebody asked for rank %.80s, which is not here", rank)
    # An empty payload fails the asker's handshake at once, where silence would cost it 5 s.
    payload = metadata[key] if known else b""
    return [identity, b"", payload, msgspec.msgpack.encode(time.perf_counter())]


class Asker:
    """Asks other engines whether claims hold; may be used from several threads."""

    def __init__(self) -> None:
        self._context = zmq.Context()

    def problem(self, host: str, port: int, claim: Claim) -> str | None:
        """Why what was read cannot be trusted, or None when it can."""
        socket: Any = self._context.socket(zmq.REQ)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, int(ASK_SECONDS * 1000))
            socket.setsockopt(zmq.IPV6, int(":" in host))
            socket.connect(make_zmq_path("tcp", host, port))
            # To a stock engine this is a wish for the metadata of rank (0, 0).
            socket.send(msgspec.msgpack.encode((question(claim), 0, 0)))
            reply = socket.recv_multipart()
        except zmq.Again:
            return f"no answer from {host}:{port} within {ASK_SECONDS:g} s"
        except zmq.ZMQError as error:
            return f"{host}:{port} cannot be asked: {error}"
        finally:
            socket.close()
        if len(reply) > 1:
            return None  # a stock engine cannot say
        return None if reply[0] == YES else reply[0].removeprefix(MARK).decode(errors="replace")

    def close(self) -> None:
        self._context.destroy(linger=0)
