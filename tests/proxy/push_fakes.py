"""Fake engines in write mode: a decode server answers once its prefill server has pushed, and waits until then."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections import Counter
from typing import Any

from aiohttp import web

from baton.cluster import Role
from tests.proxy.fakes import FakeEngine, stream

# How vLLM names the request of each endpoint, and what it takes off again to match two of them (0.32).
PREFIXES = {
    "/v1/completions": "cmpl-{}-0",
    "/v1/chat/completions": "chatcmpl-{}",
    "/v1/messages": "chatcmpl-{}",
    "/inference/v1/generate": "generate-tokens-{}",
}
_RANDOM = re.compile(r"-[0-9a-f]{8}$")
TOKENS = ("one", " two")


def about(number: str, role: str, mode: str = "push", **more: Any) -> dict[str, Any]:
    """What an engine says at ``/baton/engine``."""
    return {
        "engine_id": number,
        "transfer_mode": mode,
        "role": role,
        "side_channel_host": "127.0.0.1",
        "side_channel_port": 5559,
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "block_size": 32,
        "bidirectional": False,
        **more,
    }


def vllm_id(request: web.Request, body: dict[str, Any]) -> str:
    """The engine's own id of a request, with the random end that makes it unique there."""
    if request.path == "/v1/responses":
        base = (body.get("request_id") or f"resp_{secrets.token_hex(16)}") + "_0"
    else:
        base = PREFIXES[request.path].format(request.headers["x-request-id"])
    return f"{base}-{secrets.token_hex(4)}"


class Fabric:
    """Where prefill and decode servers meet: by engine id and by the request's id without its random end.

    Attributes:
        finished: prompts computed, whose KV cache nobody has registered for.
        registered: decode requests that wait, by the engine they were told to wait for.
        pushed: what was moved, in order.
    """

    def __init__(self) -> None:
        self.finished: Counter[tuple[str, str]] = Counter()
        self.registered: dict[tuple[str, str], asyncio.Event] = {}
        self.pushed: list[tuple[str, str]] = []

    def finish(self, engine_id: str, request_id: str) -> None:
        key = (engine_id, _RANDOM.sub("", request_id))
        waiting = self.registered.pop(key, None)
        if waiting is None:
            self.finished[key] += 1
        else:
            self.pushed.append(key)
            waiting.set()

    async def register(self, engine_id: str, request_id: str) -> None:
        """Wait for the push, for ever if need be."""
        key = (engine_id, _RANDOM.sub("", request_id))
        if self.finished[key]:
            self.finished[key] -= 1
            self.pushed.append(key)
            return
        self.registered[key] = event = asyncio.Event()
        try:
            await event.wait()
        finally:
            self.registered.pop(key, None)

    @property
    def clean(self) -> bool:
        """Whether nobody waits for anybody."""
        return not self.registered and not +self.finished


class Pushing:
    """Makes fakes push.

    Attributes:
        free: by role, whether its engines work; those that don't take requests all the same.
        starts: appended to every engine id: what a restart changes.
        mode: what the prefill servers' tickets say, in vLLM's word.
    """

    def __init__(self) -> None:
        self.fabric = Fabric()
        self.free = {role: asyncio.Event() for role in Role}
        for event in self.free.values():
            event.set()
        self.starts = ""
        self.mode = "push"

    def prepare(self, engines: list[FakeEngine]) -> None:
        for number, engine in enumerate(engines):
            kv_role = "kv_producer" if engine.role is Role.PREFILL else "kv_consumer"
            engine.about = about(f"e{number}", kv_role)
            engine.answer = self.prefill if engine.role is Role.PREFILL else self.decode

    def id_of(self, engine: FakeEngine, request: web.Request) -> str:
        said = engine.about or {}
        rank = request.headers.get("x-data-parallel-rank")
        return f"{said.get('engine_id', 'stock')}{self.starts}" + (
            f"_dp{rank or 0}" if said.get("dp_size", 1) > 1 else ""
        )

    async def prefill(self, engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        request_id = vllm_id(request, body)
        await self.free[Role.PREFILL].wait()
        engine_id = self.id_of(engine, request)
        self.fabric.finish(engine_id, request_id)
        ticket = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[engine.ledger.give()]],
            "remote_engine_id": engine_id,
            "remote_request_id": request_id,
            "remote_host": "127.0.0.1",
            "remote_port": 5559,
            "tp_size": 1,
            "pp_size": 1,
            "transfer_mode": self.mode,
        }
        usage = {"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 2}}
        choice = {"index": 0, "text": "x", "prompt_logprobs": [None, {"7": {"logprob": -1.0}}]}
        scores = choice if body.get("prompt_logprobs") is not None else {"index": 0, "text": "x"}
        return web.json_response({"choices": [scores], "usage": usage, "kv_transfer_params": ticket})

    async def decode(self, engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """A stream's head comes before its first token, as vLLM sends it."""
        await self.free[Role.DECODE].wait()
        params = body.get("kv_transfer_params")
        response = None
        if body.get("stream"):
            response = await stream(request, [])
        if params is not None:
            await self.fabric.register(params["remote_engine_id"], vllm_id(request, body))
        usage = {
            "prompt_tokens": 5,
            "completion_tokens": 2,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 5},
        }
        if not body.get("stream"):
            text = "".join(TOKENS)
            return web.json_response({"choices": [{"index": 0, "text": text, "finish_reason": "stop"}], "usage": usage})
        values: list[dict[str, Any]] = [{"choices": [{"index": 0, "text": token}]} for token in TOKENS]
        values.append({"choices": [], "usage": usage})
        events = [b"data: " + json.dumps(value).encode() + b"\n\n" for value in values]
        pieces = [*events, b"data: [DONE]\n\n", *ENDS.get(request.path, [])]
        if response is None:
            return await stream(request, pieces)
        for piece in pieces:
            await response.write(piece)
        return response


ENDS = {
    "/v1/responses": [b'event: response.completed\ndata: {"type": "response.completed"}\n\n'],
    "/v1/messages": [b'event: message_stop\ndata: {"type": "message_stop"}\n\n'],
}
