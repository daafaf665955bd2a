"""Health, metrics, instances, and what passes to one engine as it is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson

from baton.cluster import Role
from baton.http import Header, Request
from baton.proxy.journey import Way

PASSED_ON = ("/v1/models", "/version")


@dataclass(frozen=True)
class Answer:
    """A whole answer of the proxy's own."""

    status: int
    headers: list[Header]
    body: bytes


Route = Callable[[Request], Awaitable[Answer]]


def admin_routes(way: Way) -> dict[str, dict[str, Route]]:
    """Every route that does not generate: path, method, what answers."""

    async def health(_: Request) -> Answer:
        """200 only when a prefill and a decode server are usable."""
        ready = way.fleet.ready()
        return _json(200 if ready else 503, {"status": "ok" if ready else "unavailable", **counts(way)})

    async def healthcheck(_: Request) -> Answer:
        """The reference proxy's: the proxy lives, and how many instances it knows."""
        pools = way.fleet.pools
        sizes = {"prefill_instances": len(pools[Role.PREFILL]), "decode_instances": len(pools[Role.DECODE])}
        return _json(200, {"status": "ok", **sizes})

    async def liveness(_: Request) -> Answer:
        return _json(200, {"status": "ok"})

    async def metrics(_: Request) -> Answer:
        return Answer(200, [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")], way.metrics.render())

    async def instances(_: Request) -> Answer:
        rows = [
            {
                "id": each.id,
                "role": each.endpoint.role,
                "url": each.endpoint.url,
                "usable": each.usable,
                "in_flight": each.in_flight,
            }
            for each in way.fleet
        ]
        return _json(200, {"instances": rows})

    async def pass_on(request: Request) -> Answer:
        """One decode server's own answer."""
        instance = way.fleet.usable(Role.DECODE)[0]
        carried = [pair for pair in request.headers if pair[0] == b"authorization"]
        status, kind, body = await way.upstream.get(instance, request.target, carried)
        return Answer(status, [(b"content-type", kind)], body)

    own: dict[str, Route] = {
        "/health": health,
        "/readiness": health,
        "/liveness": liveness,
        "/healthcheck": healthcheck,
        "/metrics": metrics,
        "/instances": instances,
    }
    return {path: {"GET": route} for path, route in {**own, **dict.fromkeys(PASSED_ON, pass_on)}.items()}


def counts(way: Way) -> dict[str, Any]:
    """Usable and known instances by role."""
    return {
        str(role): {"usable": sum(instance.usable for instance in pool), "known": len(pool)}
        for role, pool in way.fleet.pools.items()
    }


def _json(status: int, value: object) -> Answer:
    return Answer(status, [(b"content-type", b"application/json")], orjson.dumps(value))
