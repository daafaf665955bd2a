"""Fake engines with bidirectional KV, and clients that talk with them over several turns."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.proxy.fakes import FakeEngine, House, prefill_answer, stream

COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
D_TTL_SECONDS = 480.0


@dataclass
class Clock:
    """A clock that moves when it is told to."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Blocks:
    """What a decode server holds of one answer."""

    engine_id: str
    key: str | None
    text: str
    until: float


@dataclass
class Bidirectional:
    """The engines of a house, strict about whose blocks are pulled when.

    Attributes:
        place: where in a stream the ticket stands: with the ``finish`` or the ``usage``, or ``alone``.
        boots: how often the decode servers were started.
        blocks: by number; the house's ledger says which are still held.
        pulled: texts that prefill servers had from decode servers, in order.
    """

    made: House
    clock: Clock = field(default_factory=Clock)
    place: str = "finish"
    boots: int = 0
    blocks: dict[int, Blocks] = field(default_factory=dict)
    pulled: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for engine in self.made.prefill:
            engine.answer = self.prefill
        for engine in self.made.decode:
            engine.answer = self.decode
        if self.made.proxy.turns is not None:
            self.made.proxy.turns.clock = self.clock

    @property
    def store(self) -> Any:
        assert self.made.proxy.turns is not None
        return self.made.proxy.turns

    def engine_id(self, engine: FakeEngine) -> str:
        return f"d{engine.endpoint.port}-{self.boots}"

    async def prefill(self, engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        params = body.get("kv_transfer_params")
        if params is None:
            return web.json_response({**whole(request.path, "answer 0. "), "kv_transfer_params": None})
        assert params["do_remote_decode"] is True and params["do_remote_prefill"] is False
        for (number,) in params["remote_block_ids"] or ():
            blocks = self.blocks.get(number)
            right = (
                blocks is not None
                and blocks.engine_id == params["remote_engine_id"]
                and blocks.engine_id in map(self.engine_id, self.made.decode)
                and blocks.key == request.headers.get("Authorization")
                and blocks.until > self.clock.now
                and params["unknown"] == {"passed": "on"}
            )
            if not right:
                engine.ledger.poison.append(params)
                continue
            assert blocks is not None
            engine.ledger.pull({"remote_block_ids": [[number]]})
            # Edited history: what both begin with is pulled, and no more.
            self.pulled.append(common(blocks.text, prompt_of(body)))
        return await prefill_answer(engine, request, body)

    async def decode(self, engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        answer = f"answer {len(engine.bodies)}. "
        ticket = None
        if body["kv_transfer_params"]["keep_blocks"]:
            ticket = self.give(engine, request, prompt_of(body) + answer)
        if not body.get("stream"):
            return web.json_response({**whole(request.path, answer), "kv_transfer_params": ticket})
        return await stream(request, pieces(request.path, answer, ticket, self.place))

    def give(self, engine: FakeEngine, request: web.Request, text: str) -> dict[str, Any]:
        """A ticket for what *engine* has after an answer."""
        number = engine.ledger.give()
        until = self.clock.now + D_TTL_SECONDS
        self.blocks[number] = Blocks(self.engine_id(engine), request.headers.get("Authorization"), text, until)
        return {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_block_ids": [[number]],
            "remote_engine_id": self.engine_id(engine),
            "remote_request_id": "r",
            "remote_host": "10.9.8.7",
            "remote_port": 5659,
            "remote_num_tokens": len(text),
            "transfer_mode": "pull",
            "unknown": {"passed": "on"},
        }

    def used_in(self, engine: FakeEngine, place: int = -1) -> bool:
        """Whether *engine*'s leg came with blocks of a turn."""
        return bool(engine.bodies[place]["kv_transfer_params"]["remote_block_ids"])


def common(one: str, other: str) -> str:
    size = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:size]


def prompt_of(body: dict[str, Any]) -> str:
    if "prompt" in body:
        return str(body["prompt"])
    return "".join(each["content"] for each in body.get("messages") or body["input"])


def whole(path: str, text: str) -> dict[str, Any]:
    """An answer in one piece."""
    match path:
        case "/v1/chat/completions":
            return {"choices": [{"index": 0, "message": {"content": text}, "finish_reason": "stop"}]}
        case "/v1/responses":
            return {"status": "completed", "output": [{"content": [{"text": text}]}]}
        case "/v1/messages":
            return {"type": "message", "content": [{"type": "text", "text": text}]}
    return {"choices": [{"index": 0, "text": text, "finish_reason": "length"}]}


def pieces(path: str, text: str, ticket: dict[str, Any] | None, place: str) -> list[bytes]:
    """The events of the same as a stream."""
    held = {} if ticket is None else {"kv_transfer_params": ticket}
    if path == RESPONSES:
        response = {"status": "completed", "usage": {"input_tokens": 1}}
        inside, on_top = (held, {}) if place == "finish" else ({}, held)
        return [
            event({"type": "response.created", "response": {"status": "in_progress"}}),
            event({"type": "response.output_text.delta", "delta": text}),
            event({"type": "response.completed", "response": {**response, **inside}, **on_top}),
        ]
    if path == MESSAGES:
        return [
            event({"type": "message_start", "message": {"usage": {"input_tokens": 1}}}),
            event({"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}}),
            event({"type": "message_delta", "usage": {"output_tokens": 1}}),
            event({"type": "message_stop", **held}),
        ]
    name = {"id": "c", "object": "chunk", "created": 1, "model": "m"}
    said = {"delta": {"content": text}} if path == CHAT else {"text": text}
    made = [
        {**name, "choices": [{"index": 0, **said, "finish_reason": None}]},
        {**name, "choices": [{"index": 0, **{key: {} for key in said}, "finish_reason": "stop"}]},
        {**name, "choices": [], "usage": {"prompt_tokens": 1}},
        {**name, "choices": []},
    ]
    made = made[: {"finish": 2, "usage": 3, "alone": 4}[place]]
    made[-1] = {**made[-1], **held}
    return [b"data: " + json.dumps(each).encode() + b"\n\n" for each in made] + [b"data: [DONE]\n\n"]


def event(value: dict[str, Any]) -> bytes:
    return f"event: {value['type']}\ndata: {json.dumps(value)}\n\n".encode()


@dataclass
class Talk:
    """A client's conversation: it sends all that was said, and one line more.

    Attributes:
        said: what the next request carries besides.
        raws: every answer as it came.
        echoed: the ticket of the last answer, for clients that echo it.
    """

    made: House
    path: str = COMPLETIONS
    streamed: bool = False
    conversation: str | None = "talk"
    key: str | None = None
    by_header: bool = False
    said: dict[str, Any] = field(default_factory=dict)
    history: list[str] = field(default_factory=list)
    raws: list[bytes] = field(default_factory=list)
    echoed: Any = None

    async def say(self, text: str = "And then? ", status: int = 200) -> None:
        self.history.append(text)
        headers = {"Authorization": self.key} if self.key else {}
        body: dict[str, Any] = {"stream": self.streamed, "model": "m", **self.said}
        if self.conversation is not None and self.by_header:
            headers["X-Session-ID"] = self.conversation
        elif self.conversation is not None:
            body["conversation_id"] = self.conversation
        if self.path == COMPLETIONS:
            body["prompt"] = "".join(self.history)
        else:
            lines = [{"role": "user", "content": each} for each in self.history]
            body["input" if self.path == RESPONSES else "messages"] = lines
        async with self.made.post(body, path=self.path, headers=headers) as response:
            raw = await response.read()
            assert response.status == status, raw
        self.raws.append(raw)
        # Not a word of an engine's ticket, whatever the answer.
        assert b"remote_" not in raw and b"10.9.8.7" not in raw and b"block_ids" not in raw
        if status == 200:
            self.echoed = self._ticket(raw)
            self.history.append(f"answer {raw.split(b'answer ')[1].split(b'.')[0].decode()}. ")

    async def echo(self, text: str = "And then? ") -> None:
        """The same with the ticket of the answer before."""
        self.said["kv_transfer_params"] = self.echoed
        await self.say(text)

    def _ticket(self, raw: bytes) -> Any:
        """What the answer has at the top: of the last of its events that is JSON, when it is a stream."""
        if not self.streamed:
            return json.loads(raw).get("kv_transfer_params")
        events = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: {")]
        assert all(b"kv_transfer_params" not in each for each in events[:-1])
        return json.loads(events[-1]).get("kv_transfer_params")
