"""Health, metrics, instances, and what passes to one engine as it is."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol
from urllib.parse import parse_qs

import orjson

from baton.cluster import Role
from baton.http import Header, Request
from baton.proxy import legs
from baton.proxy.errors import JSON, ProxyError
from baton.proxy.fleet import ProxyInstance
from baton.proxy.instances_file import endpoint_of
from baton.proxy.journey import Way
from baton.proxy.members import DRAIN_SECONDS, Members
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
    way: Way,
    carried: Callable[[Request], list[Header]],
    peers: Peers,
    members: Members,
    warmth: Warmth | None = None,
) -> dict[str, dict[str, Route]]:
    """Every route that does not generate: path, method, what answers.

    Args:
        carried: what an engine is told of a request besides its body.
        peers: the other workers of this proxy, whose counts are added.
        members: takes instances in and lets them go.
        warmth: the warm-up that health waits for; None for none.
    """

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
        rows = {each.id: row_of(each, way, members) for each in way.fleet}
        for other in await peers.ask(ADMIN):
            for same in orjson.loads(other)["instances"]:
                row = rows.get(same["id"])
                if row is None:
                    continue
                for count in ("in_flight", "waiting", "held"):
                    row[count] += same[count]
                if row["usable"] and not same["usable"]:
                    row.update({name: same[name] for name in ("usable", "state", "breaker", "since", "last_error")})
        said: dict[str, Any] = {"instances": list(rows.values()), "transfer_mode": way.fleet.mode}
        if way.fleet.conflict is not None:
            said["conflict"] = way.fleet.conflict
        return _json(200, said)

    async def add(request: Request) -> Answer:
        said, _ = legs.parse(request.body)
        try:
            endpoint = endpoint_of(said.get("role"), said.get("url"))
        except ValueError as error:
            raise ProxyError(400, str(error)) from None
        instance, new = await members.add(endpoint)
        return _json(201 if new else 200, row_of(instance, way, members))

    own: dict[str, Route] = {
        "/health": health,
        "/readiness": health,
        "/liveness": liveness,
        "/healthcheck": healthcheck,
        "/metrics": metrics,
        "/instances": instances,
    }
    made: dict[str, dict[str, Route]] = {path: {"GET": route} for path, route in own.items()}
    made[ADMIN]["POST"] = add
    return made | passed_routes(way, carried)


def passed_routes(way: Way, carried: Callable[[Request], list[Header]]) -> dict[str, dict[str, Route]]:
    """What passes to one engine as it is."""
    # Any engine will do; decode servers have the same model and are spared the long prompts.
    # No picks of requests that generate: none of these is a trial.
    turn = RoundRobin()

    async def pass_get(request: Request) -> Answer:
        instance = turn.pick(way.fleet.usable(Role.DECODE))
        async with way.upstream.get(instance, request.target, carried(request)) as response:
            return await read_answer(response)

    async def pass_post(request: Request) -> Answer:
        # What only the proxy may say is taken out here too: these reach the same engines.
        _, raw = legs.parse(request.body)
        instance = turn.pick(way.fleet.usable(Role.DECODE))
        headers = [JSON, *carried(request)]
        async with way.upstream.post(instance, request.target, headers, (raw,), aside=True) as response:
            return await read_answer(response)

    read: dict[str, dict[str, Route]] = {path: {"GET": pass_get} for path in _READ}
    return read | {path: {"POST": pass_post} for path in _POSTED}


def reasons_route(warmth: Warmth | None) -> dict[str, Route]:
    """How another worker of this proxy asks the first one why pairs are not proven."""

    async def reasons(_: Request) -> Answer:
        return _json(200, {"reasons": await warmth.reasons() if warmth is not None else []})

    return {"GET": reasons}


def instance_routes(path: str, way: Way, members: Members) -> dict[str, Route] | None:
    """The routes of one instance, ``/instances/ID`` and ``/instances/ID/drain``; None when *path* is none of them."""
    root, _, rest = path[1:].partition("/")
    name, _, action = rest.partition("/")
    if f"/{root}" != ADMIN or not name or action not in ("", "drain"):
        return None

    async def show(_: Request) -> Answer:
        return _json(200, row_of(members.named(name), way, members))

    async def remove(_: Request) -> Answer:
        return _json(200, row_of(await members.remove(name), way, members))

    async def drain(request: Request) -> Answer:
        asked = parse_qs(request.target.partition(b"?")[2].decode("latin-1"), keep_blank_values=True)
        unknown = set(asked) - {"remove", "timeout_secs"}
        if unknown:
            raise ProxyError(400, f"{', '.join(sorted(unknown))}: only remove and timeout_secs are known here")
        removes = asked.get("remove", ["false"])[-1]
        if removes not in ("true", "false"):
            raise ProxyError(400, f"remove={removes}: it is true or false")
        seconds = _seconds(asked.get("timeout_secs", [str(DRAIN_SECONDS)])[-1])
        return _json(202, row_of(await members.drain(name, seconds, remove=removes == "true"), way, members))

    return {"POST": drain} if action else {"GET": show, "DELETE": remove}


def worker_routes(members: Members) -> dict[str, Route]:
    """How another worker of this proxy asks for the fleet, and tells what it is."""

    async def tell(_: Request) -> Answer:
        return _json(200, members.snapshot())

    async def adopt(request: Request) -> Answer:
        members.adopt(orjson.loads(request.body))
        return _json(200, {})

    return {"GET": tell, "POST": adopt}


async def by_first(request: Request, members: Members) -> Answer | None:
    """What the first worker answers to a change of the fleet; None when it is this one's to answer.

    Raises:
        ProxyError: 503, the first worker does not answer.
    """
    if members.first is None or request.method in ("GET", "HEAD"):
        return None
    status, body = await members.first.forward(request.method, request.target, request.body)
    if not status:
        raise ProxyError(503, "the worker that decides of instances does not answer: try again", retry_after=1)
    return Answer(status, [JSON], body)


def row_of(instance: ProxyInstance, way: Way, members: Members) -> dict[str, Any]:
    """What `/instances` says of one."""
    info = instance.info
    return {
        "id": instance.id,
        "role": instance.endpoint.role,
        "url": instance.endpoint.url,
        "usable": instance.usable,
        "state": instance.state(),
        "breaker": instance.cb_state(time.monotonic()).word,
        "since": round(instance.since, 3),
        "in_flight": instance.in_flight,
        "waiting": members.waiting(instance),
        "held": way.fleet.held(instance),
        "draining": instance.draining,
        "last_error": instance.last_error or None,
        "transfer_mode": info.transfer_mode if info is not None else None,
        "engine_id": info.engine_id if info is not None else instance.engine_id,
    }


def _seconds(word: str) -> float:
    """
    Raises:
        ProxyError: 400, that is no time.
    """
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ProxyError(400, f"timeout_secs={word}: a number of seconds is wanted")
    return value


def counts(way: Way) -> dict[str, Any]:
    """Usable and known instances by role."""
    return {
        str(role): {"usable": sum(instance.usable for instance in pool), "known": len(pool)}
        for role, pool in way.fleet.pools.items()
    }


def _json(status: int, value: object) -> Answer:
    return Answer(status, [JSON], orjson.dumps(value))
