"""Health, metrics, instances, and what passes to one engine as it is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import orjson

from baton.cluster import Role
from baton.http import Header, Request
from baton.proxy import legs
from baton.proxy.errors import JSON
from baton.proxy.journey import Way
from baton.proxy.routing import RoundRobin
from baton.proxy.upstream import Answer, read_answer
from baton.proxy.workers import Peers

OPEN = frozenset({"/health", "/healthcheck", "/liveness", "/readiness", "/metrics"})
"""Paths that ask for no key: probes and scrapers have none."""
ADMIN = "/instances"
"""How the paths begin that ask for the admin key."""
_READ = ("/v1/models", "/version")
_POSTED = (
    "/tokenize",
    "/detokenize",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
)

Route = Callable[[Request], Awaitable[Answer]]


class Warmth(Protocol):
    """The warm-up of pairs, as health sees it (see :mod:`baton.proxy.warm_up`)."""

    async def ready(self) -> bool: ...

    def counts(self) -> dict[str, int] | None: ...

    async def reasons(self) -> list[dict[str, Any]]: ...


def routes(
    way: Way, carried: Callable[[Request], list[Header]], peers: Peers, warmth: Warmth | None = None
) -> dict[str, dict[str, Route]]:
    """Every route that does not generate: path, method, what answers.

    Args:
        carried: what an engine is told of a request besides its body.
        peers: the other workers of this proxy, whose counts are added.
        warmth: the warm-up that health waits for; None for none.
    """
    # Any engine will do; decode servers have the same model and are spared the long prompts.
    turn = RoundRobin()

    async def health(_: Request) -> Answer:
        """200 only when a prefill and a decode server are usable, can hand over to each other and have done so once."""
        fleet = way.fleet
        body = {**counts(way), "transfer_mode": fleet.mode}
        if fleet.conflict is not None:
            body["reason"] = fleet.conflict
        if warmth is not None and (pairs := warmth.counts()) is not None:
            body["warm_up"] = pairs
        if warmth is not None:
            body["reasons"] = await warmth.reasons()
        elif recent := way.transfers.reasons():
            body["reasons"] = [each.said() for each in recent]
        if not fleet.ready():
            return _json(503, {"status": "unavailable", **body})
        if warmth is not None and not await warmth.ready():
            return _json(503, {"status": "not proven" if body["reasons"] else "warming up", **body})
        return _json(200, {"status": "ok", **body})

    async def healthcheck(_: Request) -> Answer:
        """The reference proxy's: the proxy lives, and how many instances it knows."""
        pools = way.fleet.pools
        sizes = {"prefill_instances": len(pools[Role.PREFILL]), "decode_instances": len(pools[Role.DECODE])}
        return _json(200, {"status": "ok", **sizes})

    async def liveness(_: Request) -> Answer:
        return _json(200, {"status": "ok"})

    async def metrics(_: Request) -> Answer:
        others = await peers.ask("/metrics")
        body = way.metrics.render(others)
        return Answer(200, [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")], body)

    async def instances(_: Request) -> Answer:
        rows: list[dict[str, Any]] = [
            {
                "id": each.id,
                "role": each.endpoint.role,
                "url": each.endpoint.url,
                "usable": each.usable,
                "in_flight": each.in_flight,
                "transfer_mode": each.info.transfer_mode if each.info is not None else None,
                "engine_id": each.info.engine_id if each.info is not None else None,
            }
            for each in way.fleet
        ]
        for other in await peers.ask("/instances"):
            for row, same in zip(rows, orjson.loads(other)["instances"], strict=True):
                row["in_flight"] += same["in_flight"]
                row["usable"] &= same["usable"]
        said: dict[str, Any] = {"instances": rows, "transfer_mode": way.fleet.mode}
        if way.fleet.conflict is not None:
            said["conflict"] = way.fleet.conflict
        return _json(200, said)

    async def pass_get(request: Request) -> Answer:
        instance = turn.pick(way.fleet.usable(Role.DECODE))
        async with way.upstream.get(instance, request.target, carried(request)) as response:
            return await read_answer(response)

    async def pass_post(request: Request) -> Answer:
        # What only the proxy may say is taken out here too: these reach the same engines.
        _, raw = legs.parse(request.body)
        instance = turn.pick(way.fleet.usable(Role.DECODE))
        headers = [JSON, *carried(request)]
        async with way.upstream.post(instance, request.target, headers, (raw,)) as response:
            return await read_answer(response)

    async def reasons(_: Request) -> Answer:
        """What another worker of this proxy asks the first one for."""
        return _json(200, {"reasons": await warmth.reasons() if warmth is not None else []})

    own: dict[str, Route] = {
        "/health": health,
        "/readiness": health,
        "/liveness": liveness,
        "/healthcheck": healthcheck,
        "/metrics": metrics,
        "/instances": instances,
        "/reasons": reasons,
    }
    return {
        **{path: {"GET": route} for path, route in {**own, **dict.fromkeys(_READ, pass_get)}.items()},
        **{path: {"POST": pass_post} for path in _POSTED},
    }


def counts(way: Way) -> dict[str, Any]:
    """Usable and known instances by role."""
    return {
        str(role): {"usable": sum(instance.usable for instance in pool), "known": len(pool)}
        for role, pool in way.fleet.pools.items()
    }


def _json(status: int, value: object) -> Answer:
    return Answer(status, [JSON], orjson.dumps(value))
