"""The lab: many fake engines in one process, one ledger for all of them, faults by switch and at run time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from baton.cluster import Endpoint, Role
from baton.http import Request, Responder
from baton.sim.answering import JSON
from baton.sim.engine import Engine
from baton.sim.fabric import Fabric
from baton.sim.faults import BadFault, Fault, Faults, Kind
from baton.sim.ledger import Ledger
from baton.sim.settings import EngineSettings, EngineSpec

FIRST_SIDE_PORT = {Role.PREFILL: 5559, Role.DECODE: 5659}
REAP_SECONDS = 0.02


class Lab:
    """Fake engines that know each other.

    Args:
        specs: the engines.
        host: where all of them listen.
        seed: of faults that happen with a probability.

    Attributes:
        engines: by name, in their order.
    """

    def __init__(self, specs: Sequence[EngineSpec], host: str = "127.0.0.1", seed: int = 0) -> None:
        self.host = host
        self.faults = Faults(seed)
        # Seconds in which this whole process came to nothing: heartbeats could not be sent, so they age no lease.
        self._lost = 0.0
        self.ledger = Ledger(lambda: asyncio.get_running_loop().time() - self._lost)
        self.fabric = Fabric(self.ledger)
        self.engines: dict[str, Engine] = {}
        side = dict(FIRST_SIDE_PORT)
        for spec in specs:
            self.engines[spec.name] = _AdminEngine(self, spec, host, side[spec.role])
            side[spec.role] += spec.settings.dp_size
        self._reaping: asyncio.Task[None] | None = None

    def of(self, role: Role) -> list[Engine]:
        return [engine for engine in self.engines.values() if engine.spec.role is role]

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The engines as a proxy sees them."""
        return tuple(
            Endpoint(role=engine.spec.role, host=engine.host, port=engine.port) for engine in self.engines.values()
        )

    async def start(self) -> None:
        """Start all engines.

        Raises:
            OSError: an address cannot be had.
        """
        try:
            for engine in self.engines.values():
                await engine.start()
        except OSError:
            await self.stop()
            raise
        self._reaping = asyncio.get_running_loop().create_task(self._reap_forever())

    async def stop(self) -> None:
        if self._reaping is not None:
            self._reaping.cancel()
            await asyncio.gather(self._reaping, return_exceptions=True)
            self._reaping = None
        await asyncio.gather(*(engine.close() for engine in self.engines.values()))
        await self.fabric.close()

    async def set_faults(self, faults: Iterable[Fault]) -> None:
        """From now on *faults* stand, and no others.

        Raises:
            BadFault: one names an engine that does not exist.
        """
        wanted = list(faults)
        for fault in wanted:
            if fault.engine is not None and fault.engine not in self.engines:
                raise BadFault(f"there is no engine {fault.engine!r}: {', '.join(self.engines)}")
        self.faults.set(wanted)
        for engine in self.engines.values():
            if self.faults.stands(Kind.REFUSE, engine.name):
                engine.refuse()
            elif engine.ranks and engine.ranks[0].alive:
                await engine.listen()
            full = self.faults.stands(Kind.POOL_FULL, engine.name)
            for rank in engine.ranks:
                rank.pool.held_back = rank.pool.size if full else 0
                rank.look()

    def idle(self) -> bool:
        """Whether no engine has a request under way."""
        return all(
            not engine.load and not any(rank.alive and (rank.running or rank.waiting) for rank in engine.ranks)
            for engine in self.engines.values()
        )

    def account(self) -> dict[str, Any]:
        """The ledger as it is shown, with what the engines have under way."""
        return {
            **self.ledger.as_dict(),
            "idle": self.idle(),
            "engines": {
                engine.name: {
                    "engine_id": engine.engine_id,
                    "url": engine.url,
                    "role": str(engine.spec.role),
                    "starts": engine.starts,
                    "running": sum(rank.running for rank in engine.ranks),
                    "waiting": sum(rank.waiting for rank in engine.ranks),
                    "blocks_used": sum(rank.pool.used for rank in engine.ranks),
                }
                for engine in self.engines.values()
            },
        }

    async def admin(self, engine: Engine, request: Request) -> tuple[int, Any] | None:
        """Answer a request of the lab's own at any of its engines; None when it is none.

        ``GET /sim/ledger``, ``GET`` and ``POST /sim/faults`` (a list of faults, each as text or as an object, which
        replaces those that stand), and ``POST /sim/restart``, ``/sim/kill``, ``/sim/start``, ``/sim/stall``,
        ``/sim/wake`` for the engine that is asked, or for the one that the body names.
        """
        match request.method, request.path:
            case "GET", "/sim/ledger":
                return 200, self.account()
            case "GET", "/sim/faults":
                return 200, [fault.as_dict() for fault in self.faults.standing]
            case "POST", path if path.startswith("/sim/"):
                return await self._command(engine, path.removeprefix("/sim/"), request.body)
        return None

    async def _command(self, engine: Engine, name: str, raw: bytes) -> tuple[int, Any]:
        try:
            body = orjson.loads(raw) if raw.strip() else {}
            if name == "faults":
                given = body.get("faults", []) if isinstance(body, dict) else body
                await self.set_faults(Fault.parse(each) if isinstance(each, str) else Fault.of(each) for each in given)
                return 200, [fault.as_dict() for fault in self.faults.standing]
            if not isinstance(body, dict):
                raise BadFault("the body must be a JSON object")
            chosen = self.engines.get(body.get("engine") or engine.name)
            if chosen is None:
                raise BadFault(f"there is no engine {body.get('engine')!r}: {', '.join(self.engines)}")
            seconds = float(body.get("seconds") or 0.0)
        except (orjson.JSONDecodeError, BadFault, ValueError, AttributeError, TypeError) as error:
            return 400, {"error": str(error)}
        return await self._switch(name, chosen, seconds, asked=engine)

    async def _switch(self, name: str, chosen: Engine, seconds: float, asked: Engine) -> tuple[int, Any]:
        """A command to one engine, by its name."""
        loop = asyncio.get_running_loop()
        match name:
            case "restart" | "kill":
                # Of the one that is asked the answer goes out first, since its connection is cut.
                after = REAP_SECONDS if chosen is asked else 0.0
                work = chosen.restart(seconds, after) if name == "restart" else chosen.kill(after)
                if chosen is asked:
                    chosen.later(work)
                else:
                    await work
            case "start":
                await chosen.start()
            case "stall":
                chosen.sleep()
                if seconds:
                    loop.call_later(seconds, chosen.wake)
            case "wake":
                chosen.wake()
            case _:
                return 404, {"error": f"there is nothing at /sim/{name}"}
        return 200, {"engine": chosen.name, "engine_id": chosen.engine_id}

    async def _reap_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(REAP_SECONDS)
            late = loop.time() - before - REAP_SECONDS
            if late > REAP_SECONDS:
                self._lost += late
            if self.ledger.due():
                for lease in self.ledger.reap(self._asleep):
                    self.fabric.note_expired(lease)

    def _asleep(self, engine_id: str) -> bool:
        base = engine_id.partition("_dp")[0]
        return any(engine.asleep for engine in self.engines.values() if engine.engine_id == base)


class _AdminEngine(Engine):
    """An engine at which the lab can be asked, also while it stands still."""

    def __init__(self, lab: Lab, spec: EngineSpec, host: str, side_port: int) -> None:
        super().__init__(spec, host, side_port, lab.fabric, lab.faults)
        self._lab = lab

    async def _handle(self, request: Request, responder: Responder) -> None:
        if request.path.startswith("/sim/"):
            answer = await self._lab.admin(self, request)
            status, value = answer if answer is not None else (404, {"error": f"there is nothing at {request.path}"})
            responder.send(status, [JSON], orjson.dumps(value))
            return
        await super()._handle(request, responder)


def specs(prefill: int, decode: int, settings: EngineSettings, ports: Sequence[int] = ()) -> list[EngineSpec]:
    """Engines of both roles, all alike: ``P0``, ``P1``, ..., ``D0``, ...

    Args:
        ports: of each, prefill servers first; empty for any.
    """
    roles = [Role.PREFILL] * prefill + [Role.DECODE] * decode
    numbers = [*range(prefill), *range(decode)]
    taken = ports or [0] * len(roles)
    return [
        EngineSpec(f"{role.letter}{number}", role, port, settings)
        for role, number, port in zip(roles, numbers, taken, strict=True)
    ]
