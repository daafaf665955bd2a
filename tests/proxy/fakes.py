"""Fake engines for proxy tests: strict as real ones are, they record what they get and answer what they are told."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from baton.cluster import Endpoint, Role
from baton.proxy import Proxy, ProxySettings
from baton.proxy.release import NO_MODEL

Handler = Callable[["FakeEngine", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate")
PASSED = ("/tokenize", "/detokenize", "/v1/embeddings", "/score", "/rerank")


@dataclass
class Ledger:
    """Every KV cache that a prefill server holds for somebody, and what became of it.

    Attributes:
        held: given and neither pulled nor released.
        pulled: what decode servers have taken, in order.
        poison: taken though it was not held: a real engine would answer with garbage.
        released: given up without being taken, in order.
    """

    held: set[int] = field(default_factory=set)
    pulled: list[int] = field(default_factory=list)
    poison: list[Any] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def give(self) -> int:
        number = next(self.numbers)
        self.held.add(number)
        return number

    def pull(self, params: dict[str, Any]) -> None:
        for number in params["remote_block_ids"][0]:
            if number in self.held:
                self.held.remove(number)
                self.pulled.append(number)
            elif params.get("transfer_mode") != "push":
                # Who pushes does it once, and looks for whom: a second one to wait for it gets nothing.
                self.poison.append(params)

    def release(self, params: dict[str, Any]) -> None:
        """A decode server tells that it will not come; nothing for what is no longer held."""
        for number in params["remote_block_ids"][0]:
            if number in self.held:
                self.held.remove(number)
                self.released.append(number)


@dataclass
class FakeEngine:
    """One fake engine. ``answer`` replaces what it does; ``gone`` counts clients that left early.

    ``health`` is the status of `/health`, None to hang there, and ``probed`` counts who asked.
    With ``front`` something before it answers in its place: it takes no KV cache.
    ``about`` is what it says of itself at ``/baton/engine``; None for a stock engine, which doesn't know the question.
    ``metrics`` makes its ``/metrics``; None for one that has none.
    """

    role: Role
    ledger: Ledger = field(default_factory=Ledger)
    answer: Handler | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    raws: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    gone: int = 0
    front: bool = False
    about: dict[str, Any] | None = None
    asked: int = 0
    health: int | None = 200
    probed: int = 0
    metrics: Callable[[], str] | None = None
    server: TestServer | None = None

    @property
    def endpoint(self) -> Endpoint:
        assert self.server is not None and self.server.port is not None
        return Endpoint(role=self.role, host="127.0.0.1", port=self.server.port)

    async def start(self) -> None:
        await self.start_on(0)

    async def start_on(self, port: int) -> None:
        app = web.Application(client_max_size=1 << 26)
        for path in PATHS:
            app.router.add_post(path, self._generate)
        for path in PASSED:
            app.router.add_post(path, self._echo)
        app.router.add_get("/health", self._ok)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/baton/engine", self._about)
        app.router.add_get("/metrics", self._counts)
        self.server = TestServer(app, port=port or None)
        await self.server.start_server()

    async def _ok(self, _: web.Request) -> web.Response:
        self.probed += 1
        if self.health is None:
            await hang()
        return web.Response(status=self.health or 200)

    async def _about(self, _: web.Request) -> web.Response:
        self.asked += 1
        return web.Response(status=404) if self.about is None else web.json_response(self.about)

    async def _counts(self, _: web.Request) -> web.Response:
        return web.Response(status=404) if self.metrics is None else web.Response(text=self.metrics())

    async def _models(self, request: web.Request) -> web.Response:
        self._note(request)
        return web.json_response({"object": "list", "data": [{"id": "m"}]})

    async def _echo(self, request: web.Request) -> web.Response:
        body = await request.json()
        self._note(request)
        self.bodies.append(body)
        return web.json_response({"path": request.path, "body": body})

    def _note(self, request: web.Request) -> None:
        self.paths.append(request.path)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = await request.json()
        if body.get("model") == NO_MODEL:
            assert self.role is Role.DECODE and request.path == "/v1/completions"
            self.ledger.release(body["kv_transfer_params"])
            return web.json_response({"error": {"message": f"there is no {NO_MODEL}"}}, status=404)
        self._note(request)
        self.raws.append(raw)
        self.bodies.append(body)
        refused = strict(body, self.role)
        if refused is not None:
            return refused
        params = body.get("kv_transfer_params") or {}
        if self.role is Role.DECODE and params.get("remote_block_ids") and not self.front:
            self.ledger.pull(params)
        try:
            if self.answer is not None:
                return await self.answer(self, request, body)
            return await (prefill_answer if self.role is Role.PREFILL else decode_answer)(self, request, body)
        except asyncio.CancelledError:
            self.gone += 1
            raise


def strict(body: dict[str, Any], role: Role) -> web.Response | None:
    """What vLLM refuses, and what breaks a decode server that has no logits of the prompt."""
    fields = {**body, **(body.get("sampling_params") or {})}
    cap = fields.get("max_completion_tokens") or fields.get("max_tokens")
    if cap == 0 and not fields.get("echo"):
        return web.json_response({"error": {"message": "max_tokens must be at least 1"}}, status=400)
    if cap is not None and (fields.get("min_tokens") or 0) > cap:
        return web.json_response({"error": {"message": "min_tokens must be at most max_tokens"}}, status=400)
    if body.get("stream_options") and not body.get("stream"):
        return web.json_response({"error": {"message": "stream_options without stream"}}, status=400)
    scores = fields.get("prompt_logprobs") is not None or (fields.get("echo") and fields.get("logprobs") is not None)
    if role is Role.DECODE and scores and body.get("kv_transfer_params"):
        return web.json_response({"error": {"message": "no logits of the prompt"}}, status=500)
    return None


async def prefill_answer(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    if request.transport is None or request.transport.is_closing():
        # An engine that knows that its client has left keeps nothing.
        raise asyncio.CancelledError
    samples = (body.get("n") or 1) * (len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1)
    numbers = [engine.ledger.give() for _ in range(samples)]
    ticket = {"do_remote_prefill": True, "remote_engine_id": "p", "remote_block_ids": [numbers[:1]]}
    return web.json_response({"choices": [{"text": "x"}], "kv_transfer_params": ticket})


TOKENS = ("one", " two", " thr\u00e9\u00e9")


async def decode_answer(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    if not body.get("stream"):
        return web.json_response({"choices": [{"text": "".join(TOKENS)}], "kv_transfer_params": None})
    events = [f'data: {{"choices": [{{"text": "{token}"}}]}}\n\n'.encode() for token in TOKENS]
    return await stream(request, [*events, b"data: [DONE]\n\n"])


async def stream(request: web.Request, pieces: list[bytes], **headers: str) -> web.StreamResponse:
    """A stream of events, written piece by piece."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", **headers})
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
    return response


async def hang(*_: Any) -> web.StreamResponse:
    """Never answers."""
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


@dataclass
class House:
    """A proxy with its fake engines and a client."""

    client: aiohttp.ClientSession
    url: str
    prefill: list[FakeEngine]
    decode: list[FakeEngine]
    proxy: Proxy
    ledger: Ledger

    def post(self, body: Any, path: str = "/v1/completions", **options: Any) -> Any:
        return self.client.post(f"{self.url}{path}", json=body, **options)

    async def get(self, path: str, **options: Any) -> tuple[int, str]:
        async with self.client.get(f"{self.url}{path}", **options) as response:
            return response.status, await response.text()


@contextlib.asynccontextmanager
async def house(
    prefill: int = 1,
    decode: int = 1,
    prepare: Callable[[list[FakeEngine]], None] = lambda _: None,
    **settings: Any,
) -> AsyncIterator[House]:
    """A running house; in the end nothing that was handed over may have been taken twice or out of thin air.

    *prepare* sees the engines before the proxy does.
    """
    ledger = Ledger()
    roles = [Role.PREFILL] * prefill + [Role.DECODE] * decode
    engines = [FakeEngine(role, ledger) for role in roles]
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await engine.start()
            assert engine.server is not None
            stack.push_async_callback(engine.server.close)
        prepare(engines)
        options = {"host": "127.0.0.1", "port": 0, **settings}
        proxy = Proxy(ProxySettings(endpoints=tuple(each.endpoint for each in engines), **options))
        addresses = await proxy.start()
        stack.push_async_callback(proxy.stop, 0.0)
        client = await stack.enter_async_context(aiohttp.ClientSession())
        url = f"http://127.0.0.1:{addresses[0][1]}" if addresses else "http://localhost"
        yield House(client, url, engines[:prefill], engines[prefill:], proxy, ledger)
    assert ledger.poison == []


def with_house(test: Callable[[House], Awaitable[None]], **options: Any) -> None:
    """Run *test* in a house of its own."""

    async def go() -> None:
        async with house(**options) as made:
            await test(made)

    asyncio.run(go())


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for *condition*, and fail when it does not come true."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def settled(value: Callable[[], int], seconds: float = 60.0) -> int:
    """*value* once it has stood still, and fail when it never does."""
    async with asyncio.timeout(seconds):
        last, same = value(), 0
        while same < 10:
            await asyncio.sleep(0.02)
            same = same + 1 if value() == last else 0
            last = value()
    return last
