"""What a competent proxy on aiohttp looks like: pooled client, streamed answer, the same two legs.

usage: python aiohttp_proxy.py PORT PREFILL_PORT DECODE_PORT
"""

import sys

import aiohttp
from aiohttp import web

PORT, PREFILL, DECODE = map(int, sys.argv[1:4])
ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


async def completions(request: web.Request) -> web.StreamResponse:
    session: aiohttp.ClientSession = request.app["session"]
    body = await request.json()
    leg = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": ASK}
    async with session.post(f"http://127.0.0.1:{PREFILL}{request.path}", json=leg) as response:
        ticket = (await response.json())["kv_transfer_params"]
    leg = {**body, "kv_transfer_params": ticket}
    async with session.post(f"http://127.0.0.1:{DECODE}{request.path}", json=leg) as response:
        if not body.get("stream"):
            return web.Response(body=await response.read(), content_type="application/json")
        answer = web.StreamResponse(headers={"Content-Type": response.headers["Content-Type"]})
        await answer.prepare(request)
        async for data in response.content.iter_any():
            await answer.write(data)
        return answer


async def session(app: web.Application):
    app["session"] = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    yield
    await app["session"].close()


async def health(_: web.Request) -> web.Response:
    return web.Response()


app = web.Application(client_max_size=1 << 26)
app.cleanup_ctx.append(session)
app.router.add_post("/v1/completions", completions)
app.router.add_get("/health", health)
web.run_app(app, host="127.0.0.1", port=PORT, access_log=None, print=None)
