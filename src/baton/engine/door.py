"""The engine's door: an ASGI middleware, vLLM's own way (``--middleware``) to stand before its API.

It refuses tickets that would break the engine, whatever the path by which they come. It adds ``kv_transfer_params`` to
the last chunk of a stream whose request carried some (vLLM 0.32 gives them in JSON answers only), and says at
``GET /baton/engine`` what this engine is.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from typing import Any

import orjson

from baton.engine.tickets import problem

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

ABOUT = "/baton/engine"
_FORM = b"multipart/form-data"
"""Of uploads: they carry no ticket, and are not read twice."""
_RANK = b"x-data-parallel-rank"
_KEY = "kv_transfer_params"
_DONE = b"data: [DONE]"


class Outcome:
    """The ticket that the engine gives for one HTTP request, taken off the outputs as they pass.

    Attributes:
        ticket: of the request that ended last; None until there is one.
    """

    def __init__(self) -> None:
        self.ticket: dict[str, Any] | None = None
        self._open = 0

    @property
    def known(self) -> bool:
        """Whether everything that this request generates has ended, with a ticket."""
        return self.ticket is not None and self._open == 0

    def watch(self, outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """*outputs* (vLLM's RequestOutputs), looked at in passing."""
        self._open += 1
        return self._passing(outputs)

    async def _passing(self, outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                if output.kv_transfer_params is not None:
                    self.ticket = output.kv_transfer_params
                if output.finished:
                    self._open -= 1
                yield output


CURRENT: contextvars.ContextVar[Outcome | None] = contextvars.ContextVar("baton_outcome", default=None)
"""Of the HTTP request that is being answered, when it carried a ticket."""


class Door:
    """The middleware. *app* is the ASGI application behind it."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] == ABOUT and scope["method"] == "GET":
            await answer(send, 200, about(scope["app"].state.vllm_config))
        elif scope["method"] == "POST" and not _header(scope, b"content-type").startswith(_FORM):
            await self._generate(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _generate(self, scope: Message, receive: Receive, send: Send) -> None:
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        config = scope["app"].state.vllm_config
        try:
            tickets = tickets_in(b"".join(message.get("body", b"") for message in messages))
        except RecursionError:
            await refuse(send, "the body is nested too deeply", None)
            return
        wrong = rank_problem(_header(scope, _RANK), config)
        if wrong is not None:
            await refuse(send, wrong, _RANK.decode())
            return

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        if not tickets:
            await self._app(scope, replay, send)
            return
        push, transfer = _pushes(config), config.kv_transfer_config
        own = transfer.engine_id if transfer is not None else None
        wrong = next(
            (found for found in (problem(ticket, push=push, engine_id=own) for ticket in tickets) if found), None
        )
        if wrong is not None:
            await refuse(send, wrong, _KEY)
            return
        outcome = Outcome()
        token = CURRENT.set(outcome)
        try:
            await self._app(scope, replay, LastChunk(outcome, send))
        finally:
            CURRENT.reset(token)


class LastChunk:
    """Passes an answer on; the last chunk of a stream gets the ticket.

    Chunks pass at once until the request has ended in the engine; from then on one is held back until the next shows
    that it was not the last.
    """

    def __init__(self, outcome: Outcome, send: Send) -> None:
        self._outcome = outcome
        self._send = send
        self._stream = False
        self._held: Message | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._stream = any(
                name.lower() == b"content-type" and value.startswith(b"text/event-stream")
                for name, value in message["headers"]
            )
        elif self._stream and self._outcome.known:
            await self._hold(message)
            return
        await self._send(message)

    async def _hold(self, message: Message) -> None:
        body, more = message.get("body", b""), message.get("more_body", False)
        held, self._held = self._held, None
        if held is None and body and not body.startswith(_DONE) and more:
            self._held = message
            return
        if held is not None:
            last = body.startswith(_DONE) or not more
            if last:
                held["body"] = with_ticket(held["body"], self._outcome.ticket or {})
            await self._send(held)
            if not last:
                self._held = message
                return
        await self._send(message)


def with_ticket(chunk: bytes, ticket: dict[str, Any]) -> bytes:
    """The chunk of a stream, with the ticket on top of its last event's JSON; unchanged when it holds no object."""
    end = chunk.rstrip()
    if not end.endswith(b"}") or b"data: {" not in end:
        return chunk
    joint = b"" if end[:-1].rstrip().endswith(b"{") else b","
    return b'%b%b"%b":%b}%b' % (end[:-1], joint, _KEY.encode(), orjson.dumps(ticket, default=list), chunk[len(end) :])


def tickets_in(body: bytes) -> list[Any]:
    """Every ticket that vLLM would find in a request's *body*; none when it is no JSON object: vLLM says so itself.

    Read as vLLM reads it: by Python's own parser, which takes UTF-16, NaN and lone surrogates for good.

    Raises:
        RecursionError: it is nested too deeply to be read.
    """
    # An escape may spell any letter of the key, and in UTF-16 or -32 there is a zero in each.
    if body.find(_KEY.encode()) < 0 and body.find(b"\\u") < 0 and body.find(b"\0") < 0:
        return []
    try:
        value = json.loads(body)
    except ValueError:
        return []
    found: list[Any] = []
    for place in ((), ("vllm_xargs",), ("extra_args",), ("sampling_params",), ("sampling_params", "extra_args")):
        where = value
        for name in place:
            where = where.get(name) if isinstance(where, dict) else None
        if isinstance(where, dict) and where.get(_KEY) is not None:
            found.append(where[_KEY])
    return found


def rank_problem(said: bytes, vllm_config: Any) -> str | None:
    """What is wrong with the data-parallel rank that a request asks for, or None. vLLM asks it of no number."""
    ranks = vllm_config.parallel_config.data_parallel_size
    if not said or (said.isdigit() and len(said) < 8 and int(said) < ranks):
        return None
    return f"X-data-parallel-rank is {said[:40].decode('latin-1')!r}, not a number from 0 to {ranks - 1}"


def _header(scope: Message, name: bytes) -> bytes:
    return next((bytes(value) for key, value in scope.get("headers", ()) if key == name), b"")


def about(vllm_config: Any) -> dict[str, Any]:
    """What an engine is, for who routes to it (docs/reference.md)."""
    from vllm import envs
    from vllm.platforms import current_platform

    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    if transfer is None:
        return {"transfer_mode": None}
    return {
        "engine_id": transfer.engine_id,
        "transfer_mode": "push" if _pushes(vllm_config) else "pull",
        "role": transfer.kv_role,
        "side_channel_host": envs.VLLM_NIXL_SIDE_CHANNEL_HOST,
        "side_channel_port": envs.VLLM_NIXL_SIDE_CHANNEL_PORT,
        "tp_size": parallel.tensor_parallel_size,
        "pp_size": parallel.pipeline_parallel_size,
        "dp_size": parallel.data_parallel_size,
        "block_size": vllm_config.cache_config.block_size,
        "kv_lease_seconds": transfer.get_from_extra_config("kv_lease_duration", 30),
        "device": current_platform.device_type,
        "bidirectional": bool(transfer.get_from_extra_config("bidirectional_kv_xfer", False)),
        "compatibility": compatibility(vllm_config),
    }


def compatibility(vllm_config: Any) -> dict[str, Any]:
    """What two engines must have in common to hand over, by name.

    The same that vLLM hashes (0.32, nixl/metadata.py, ``compute_nixl_compatibility_hash``), since a hash cannot say
    which of its parts differs; without the attention backend, which only workers know.
    """
    from vllm import __version__
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NIXL_CONNECTOR_VERSION

    model, cache = vllm_config.model_config, vllm_config.cache_config
    speculative = vllm_config.speculative_config
    return {
        "vllm_version": __version__,
        "nixl_connector_version": str(NIXL_CONNECTOR_VERSION),
        "model": model.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(cache.cache_dtype),
        "num_kv_heads": model.get_total_num_kv_heads(),
        "head_size": model.get_head_size(),
        "num_layers": model.get_total_num_hidden_layers(),
        "hybrid_kv_cache": not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager,
        "speculative": f"{speculative.method} {speculative.model}" if speculative is not None else "none",
    }


def _pushes(vllm_config: Any) -> bool:
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and "Push" in (transfer.kv_connector or "")


async def refuse(send: Send, message: str, param: str | None) -> None:
    await answer(send, 400, {"error": {"message": message, "type": "BadRequestError", "param": param, "code": 400}})


async def answer(send: Send, status: int, value: dict[str, Any]) -> None:
    body = orjson.dumps(value)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
