"""Fake engines for proxy tests: they record what they get and answer what they are told."""

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

Handler = Callable[["FakeEngine", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@dataclass
class FakeEngine:
    """One fake engine. ``answer`` replaces what it does; ``gone`` counts clients that left early."""

    role: Role
    answer: Handler | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    gone: int = 0
    server: TestServer | None = None
    tickets: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def endpoint(self) -> Endpoint:
        assert self.server is not None and self.server.port is not None
        return Endpoint(role=self.role, host="127.0.0.1", port=self.server.port)

    async def start(self) -> None:
        await self.start_on(0)

    async def start_on(self, port: int) -> None:
        app = web.Application(client_max_size=1 << 26)
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._generate)
        app.router.add_get("/health", self._ok)
        app.router.add_get("/v1/models", self._models)
        self.server = TestServer(app, port=port or None)
        await self.server.start_server()

    async def _ok(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m"}]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        try:
            if self.answer is not None:
                return await self.answer(self, request, body)
            return await (prefill_answer if self.role is Role.PREFILL else decode_answer)(self, request, body)
        except asyncio.CancelledError:
            self.gone += 1
            raise


async def prefill_answer(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response(
        {
            "choices": [{"text": "x"}],
            "kv_transfer_params": {
                "do_remote_prefill": True,
                "remote_engine_id": "p",
                "remote_block_ids": [[next(engine.tickets)]],
            },
        }
    )


TOKENS = ("one", " two", " thr\u00e9\u00e9")


async def decode_answer(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    if not body.get("stream"):
        return web.json_response({"choices": [{"text": "".join(TOKENS)}], "kv_transfer_params": None})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for token in TOKENS:
        await response.write(f'data: {{"choices": [{{"text": "{token}"}}]}}\n\n'.encode())
    await response.write(b"data: [DONE]\n\n")
    return response


@dataclass
class House:
    """A proxy with its fake engines and a client."""

    client: aiohttp.ClientSession
    url: str
    prefill: list[FakeEngine]
    decode: list[FakeEngine]
    proxy: Proxy

    def post(self, body: Any, path: str = "/v1/completions", **options: Any) -> Any:
        return self.client.post(f"{self.url}{path}", json=body, **options)


@contextlib.asynccontextmanager
async def house(prefill: int = 1, decode: int = 1, **settings: Any) -> AsyncIterator[House]:
    engines = [FakeEngine(Role.PREFILL) for _ in range(prefill)] + [FakeEngine(Role.DECODE) for _ in range(decode)]
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await engine.start()
            assert engine.server is not None
            stack.push_async_callback(engine.server.close)
        proxy = Proxy(
            ProxySettings(host="127.0.0.1", port=0, endpoints=tuple(each.endpoint for each in engines), **settings)
        )
        ((_, port),) = await proxy.start()
        stack.push_async_callback(proxy.stop, 0.0)
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield House(client, f"http://127.0.0.1:{port}", engines[:prefill], engines[prefill:], proxy)


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for *condition*, and fail when it does not come true."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def settled(value: Callable[[], int], seconds: float = 10.0) -> int:
    """*value* once it has stood still, and fail when it never does."""
    async with asyncio.timeout(seconds):
        last, same = value(), 0
        while same < 10:
            await asyncio.sleep(0.02)
            same = same + 1 if value() == last else 0
            last = value()
    return last
