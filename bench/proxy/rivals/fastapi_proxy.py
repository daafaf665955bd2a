"""The shape of the field's example proxies: FastAPI in front, httpx behind, the same two legs.

usage: python fastapi_proxy.py PORT PREFILL_PORT DECODE_PORT
"""

import sys

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

PORT, PREFILL, DECODE = map(int, sys.argv[1:4])
ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
prefill = httpx.AsyncClient(base_url=f"http://127.0.0.1:{PREFILL}", timeout=None, limits=limits)
decode = httpx.AsyncClient(base_url=f"http://127.0.0.1:{DECODE}", timeout=None, limits=limits)
app = FastAPI()


@app.get("/health")
async def health() -> Response:
    return Response()


@app.post("/v1/completions")
async def completions(request: Request) -> Response:
    body = await request.json()
    leg = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": ASK}
    ticket = (await prefill.post("/v1/completions", json=leg)).json()["kv_transfer_params"]
    leg = {**body, "kv_transfer_params": ticket}
    if not body.get("stream"):
        answer = await decode.post("/v1/completions", json=leg)
        return Response(answer.content, media_type="application/json")

    async def events():
        async with decode.stream("POST", "/v1/completions", json=leg) as response:
            async for data in response.aiter_bytes():
                yield data

    return StreamingResponse(events(), media_type="text/event-stream")


uvicorn.run(app, host="127.0.0.1", port=PORT, log_level="error", access_log=False)
