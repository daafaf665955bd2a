"""One real hand-off between two engines over their own HTTP, timed and counted; for the doctor."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from baton.hand_over import ASK, push_params
from baton.launch.lazy import lazily
from baton.launch.probe import counter_if_any, url_of

if TYPE_CHECKING:
    import aiohttp
else:
    aiohttp = lazily("aiohttp")

NIXL_BYTES = "vllm:nixl_bytes_transferred_sum"
COUNT_SECONDS = 12.0
"""Until an engine has published what it moved: with its next step or its next log line, every 10 s."""
SHOWN = 200


class HandOffFailed(Exception):
    """A pair did not hand over.

    Attributes:
        remedy: what to do.
    """

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


@dataclass(frozen=True)
class Peer:
    """An engine of a pair.

    Attributes:
        id: for people.
        host, port: of its API.
        about: what it says at /baton/engine; None when it says nothing.
    """

    id: str
    host: str
    port: int
    about: Mapping[str, Any] | None

    @property
    def url(self) -> str:
        return url_of(self.host, self.port, "")


@dataclass(frozen=True)
class HandedOver:
    """What one hand-off took.

    Attributes:
        prefill_ms: until the prefill server answered.
        decode_ms: from the decode server's request to its answer: the KV cache's way and one token.
        moved: bytes, by the engines' own counters; None when they have none.
    """

    prefill_ms: float
    decode_ms: float
    moved: int | None


async def hand_over(
    session: aiohttp.ClientSession, prefill: Peer, decode: Peer, model: str, count_seconds: float = COUNT_SECONDS
) -> HandedOver:
    """Have *prefill* compute a prompt that no cache holds, and *decode* take it over and make one token.

    Raises:
        HandOffFailed: one of them refused, gave no ticket or cannot be reached.
    """
    before = await _moved(prefill, decode)
    pushes = bool(prefill.about and prefill.about.get("transfer_mode") == "push")
    body = {"model": model, "prompt": secrets.token_hex(100), "max_tokens": 1, "temperature": 0}
    headers = {"x-request-id": f"doctor-{secrets.token_hex(8)}"}
    first = {**body, "kv_transfer_params": dict(ASK)}
    if pushes:
        assert prefill.about is not None
        ticket = pushed_by(prefill.about, headers["x-request-id"])
        (_, prefill_ms), (_, decode_ms) = await asyncio.gather(
            _post(session, prefill, first, headers | _first_rank(prefill)),
            _post(session, decode, {**body, "kv_transfer_params": ticket}, headers),
        )
    else:
        answer, prefill_ms = await _post(session, prefill, first, headers)
        params = answer.get("kv_transfer_params")
        if not isinstance(params, dict) or not params.get("do_remote_prefill"):
            raise HandOffFailed(
                f"{prefill.id} computed the prompt and gave no ticket",
                "start it with `baton engine --role prefill`, or with a --kv-transfer-config that names a connector",
            )
        ticket = {**params, "keep_blocks": False}
        _, decode_ms = await _post(session, decode, {**body, "kv_transfer_params": ticket}, headers)
    return HandedOver(prefill_ms, decode_ms, await _moved_since(prefill, decode, before, count_seconds))


def pushed_by(about: Mapping[str, Any], request_id: str) -> dict[str, Any]:
    """What a decode server is told in write mode: to be pushed to by the first rank of the engine that says *about*."""
    many = about.get("dp_size", 1) > 1
    return push_params(
        f"{about['engine_id']}_dp0" if many else about["engine_id"],
        about["side_channel_host"],
        about["side_channel_port"],
        request_id,
        tp_size=about.get("tp_size", 1),
        pp_size=about.get("pp_size", 1),
    )


def _first_rank(peer: Peer) -> dict[str, str]:
    return {"x-data-parallel-rank": "0"} if peer.about and peer.about.get("dp_size", 1) > 1 else {}


async def _post(
    session: aiohttp.ClientSession, peer: Peer, body: Mapping[str, Any], headers: Mapping[str, str]
) -> tuple[dict[str, Any], float]:
    """The answer and its milliseconds."""
    started = time.monotonic()
    try:
        async with session.post(f"{peer.url}/v1/completions", json=body, headers=headers) as response:
            text = await response.text()
            status = response.status
    except TimeoutError as error:
        raise HandOffFailed(
            f"{peer.id} did not answer in time",
            "see its log; a decode server that waits cannot reach the prefill server's side channel or its memory",
        ) from error
    except aiohttp.ClientError as error:
        raise HandOffFailed(f"{peer.id} broke off: {error or type(error).__name__}", "see its log") from error
    if status != 200:
        key = "give the engines' key with --engine-api-key" if status == 401 else "see its log"
        raise HandOffFailed(f"{peer.id} answered {status}: {text[:SHOWN]}", key)
    try:
        value = _object(text)
    except ValueError as error:
        raise HandOffFailed(f"{peer.id} answered what is not JSON: {text[:SHOWN]}", "see its log") from error
    reasons = [each.get("finish_reason") for each in value.get("choices") or () if isinstance(each, dict)]
    if "error" in reasons or "abort" in reasons:
        raise HandOffFailed(
            f"{peer.id} says that generation failed (finish_reason {reasons[0]})",
            "the KV cache did not arrive: see its log for NIXL's error, and check the side channel and the backend",
        )
    return value, (time.monotonic() - started) * 1000


def _object(text: str) -> dict[str, Any]:
    value = orjson.loads(text)
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value


async def _moved(prefill: Peer, decode: Peer) -> float | None:
    """Bytes that both have moved so far; None when neither counts."""
    try:
        counted = [await counter_if_any(each.host, each.port, NIXL_BYTES) for each in (prefill, decode)]
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None
    found = [each for each in counted if each is not None]
    return sum(found) if found else None


async def _moved_since(prefill: Peer, decode: Peer, before: float | None, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while True:
        now = await _moved(prefill, decode)
        if now is not None and now > (before or 0):
            return int(now - (before or 0))
        if time.monotonic() > deadline:
            return None if now is None else 0
        await asyncio.sleep(0.2)
