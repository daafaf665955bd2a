"""Health, metrics, instances, and what passes to one engine as it is."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from baton.cluster import Role
from baton.proxy.journey import Way

PASSED_ON = ("/v1/models", "/version")


def add_routes(app: web.Application, way: Way) -> None:
    """Add every route that does not generate."""

    async def health(_: web.Request) -> web.Response:
        """200 only when a prefill and a decode server are usable."""
        ready = way.fleet.ready()
        return _json(200 if ready else 503, {"status": "ok" if ready else "unavailable", **counts(way)})

    async def healthcheck(_: web.Request) -> web.Response:
        """The reference proxy's: the proxy lives, and how many instances it knows."""
        pools = way.fleet.pools
        return _json(
            200,
            {
                "status": "ok",
                "prefill_instances": len(pools[Role.PREFILL]),
                "decode_instances": len(pools[Role.DECODE]),
            },
        )

    async def liveness(_: web.Request) -> web.Response:
        return _json(200, {"status": "ok"})

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=way.metrics.render(), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def instances(_: web.Request) -> web.Response:
        return _json(
            200,
            {
                "instances": [
                    {
                        "id": each.id,
                        "role": each.endpoint.role,
                        "url": each.endpoint.url,
                        "usable": each.usable,
                        "in_flight": each.in_flight,
                    }
                    for each in way.fleet
                ]
            },
        )

    async def pass_on(request: web.Request) -> web.Response:
        """One decode server's own answer."""
        instance = way.fleet.usable(Role.DECODE)[0]
        carried = {"Authorization": request.headers["Authorization"]} if "Authorization" in request.headers else {}
        status, kind, body = await way.upstream.get(instance, request.path, carried)
        return web.Response(status=status, body=body, headers={"Content-Type": kind or "application/json"})

    app.router.add_get("/health", health)
    app.router.add_get("/readiness", health)
    app.router.add_get("/liveness", liveness)
    app.router.add_get("/healthcheck", healthcheck)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/instances", instances)
    for path in PASSED_ON:
        app.router.add_get(path, pass_on)


def counts(way: Way) -> dict[str, Any]:
    """Usable and known instances by role."""
    return {
        str(role): {"usable": sum(instance.usable for instance in pool), "known": len(pool)}
        for role, pool in way.fleet.pools.items()
    }


def _json(status: int, value: object) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(value), content_type="application/json")
